"""The whole server under a virtual clock: real actors, real scheduler, real messages. The device, the disk,
the clock, the threads and the processes are simulated. `docs/internals/simulation.md` explains how to use
it."""
