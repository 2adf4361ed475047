"""The four parts that are trained, and what their trainings share."""
