"""Facts without torch: offload modules, recomputation, model shapes, parallel layouts, devices."""
