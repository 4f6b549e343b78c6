"""The step as data: ops, phases, what is proved of them, and how long they would take. Pure."""
