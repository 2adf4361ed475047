"""The state of requests: lifecycle, what came of the answer, the stream that a client reads, metrics, trace.

May import input, access and fairness; knows neither stages nor HTTP.
"""
