"""Request state: lifecycle, answer so far, response stream, metrics and trace.

May import input, access and fairness; knows neither stages nor HTTP.
"""
