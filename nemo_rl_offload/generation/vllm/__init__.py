"""Generation by vLLM's engines: the driver's side, a process with one engine, and what is said to the engine."""
