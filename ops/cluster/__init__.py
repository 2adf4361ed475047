"""``omnirelay cluster``: the stack on a Ray cluster.

Ray places processes by their resources and starts them again elsewhere when their node is gone.  Here is
only what hands the stack to it: a plan of resources (``plan``), an actor that runs one process (``actors``
around ``supervisor``), one that owns the numbers of replicas (``controller`` with ``autoscaling``), and the
commands.
Only ``actors``, ``controller`` and ``connection`` import Ray.
"""
