"""The paged stash: activations of experts wait for their backward in pages, copied without any read on the host."""
