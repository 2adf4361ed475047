"""The operator's commands: the stack on one machine, the doctor, keys, checkpoints, offline inference.

It may import everything below: services, gateway, shared, omnirelay.
"""
