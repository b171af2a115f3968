"""Several CPU devices, for the tests of sharding."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
