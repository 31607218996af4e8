"""An engine's process that waits long for other engines' pages, so they come in time on a busy machine, too.

    python patient_engine.py ... FD

The arguments are those of `python -m personae.actors.enginecore`. See `patience.py`.
"""

import sys
from pathlib import Path

from patience import PATIENCE

from personae.actors.enginecore import page_server
from personae.actors.enginecore.core import main
from personae.engine.scheduling import sequence_table
from personae.engine.tiers import peers, transfer

PATIENT = (sys.executable, str(Path(__file__).resolve()))

if __name__ == "__main__":
    sequence_table.LONGEST_FETCHES = (PATIENCE, PATIENCE)
    peers.LONGEST_FETCH = transfer.SEND_SECONDS = page_server.HANDSHAKE_SECONDS = PATIENCE
    main()
