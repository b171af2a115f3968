"""The scheduler's plans carried out on the device."""
