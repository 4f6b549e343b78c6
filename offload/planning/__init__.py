"""What a model needs, what the hardware gives, and where each value goes. Pure: no torch."""
