"""The whole company under a virtual clock: real actors, real scheduler, real wire; the device, the disk, the
clock, the threads and the processes are simulated. `docs/simulation.md` says how to use it."""
