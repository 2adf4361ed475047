"""``omnirelay cluster``: the stack on a Ray cluster.

Ray places processes by their resources and restarts them when they end or their node is gone.  This package
hands the stack to it: a plan of resources (``plan``), an actor that runs one process (``actors``), one that
owns the numbers of replicas (``controller`` with ``autoscaling``), and the commands.
Only ``actors``, ``controller`` and ``connection`` import Ray.
"""
