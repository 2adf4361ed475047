"""The gateway: takes clients' requests, runs them through the stages, and streams the answers.

Packages, from the top: ``http`` and ``tcp`` (clients), ``dispatch`` (stages), ``requests`` (state), ``input``
(prompts and media), ``access`` (keys), ``fairness`` (queues and quotas).  Loads neither PyTorch nor vLLM.
"""
