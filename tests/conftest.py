"""Before JAX is imported: the CPU as eight devices, and jaxtyping's shape checks compiled into our modules."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

from jaxtyping import install_import_hook

# Kept for the whole run: every function of ours that says a shape is held to it, in tests only.
install_import_hook("lrkv_jax", "beartype.beartype")
