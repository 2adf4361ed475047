"""JSON schemas become grammars in a process of their own: the step loop neither parses nor compiles."""
