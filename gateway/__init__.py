"""The gateway: takes clients' requests, follows each through the stages, and returns its answer.

``manager`` owns the requests.  Its rooms know less the further down they are: ``http`` and ``tcp`` (clients),
``dispatch`` (stages), ``requests`` (state), ``input`` (prompts and media), ``access`` (keys),
``fairness`` (queues and budgets).  Loads neither PyTorch nor vLLM.
"""
