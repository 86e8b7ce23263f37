"""Where offloaded bytes go, and how: one protocol (`base`), one module per kind of device."""
