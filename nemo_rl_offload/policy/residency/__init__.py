"""What of a model waits in host memory, and how it comes back."""
