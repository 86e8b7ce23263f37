"""The model that is trained: a Ray actor for each rank, and the driver's handle on all of them."""
