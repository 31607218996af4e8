"""The whole company under a virtual clock: real actors, real scheduler, real wire; the device, the disk, the
clock, the threads and the processes are simulated. `docs/internals/simulation.md` says how to use it."""
