"""The optimizer's side: its torch face, the updates of a step, and states in and out."""
