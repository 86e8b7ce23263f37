"""What offloading moves and costs, in plain Python: no torch, no Ray."""
