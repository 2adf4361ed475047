"""A discrete-event simulation of a stack of any size, with the step times that benchmarks measured."""
