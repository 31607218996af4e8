"""The engine core's process: `python -m personae.actors.enginecore FD`, see core.py."""

import gc

gc.disable()  # what is imported and loaded is no garbage; `spare_what_is_here` turns it on

from personae.actors.enginecore.core import main  # noqa: E402 - the imports are what must not be visited

gc.freeze()  # the collection after loading need not visit it
main()
