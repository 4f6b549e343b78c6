"""The model's side: units, hooks, parameters, gradients, and the engine that they call."""
