"""The engine core: the actors that hold the device."""
