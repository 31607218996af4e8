"""A callback for transformers' Trainer, and so for TRL's: it pushes the adapter when the training ends.

from personae.integrations.transformers import PushAdapter

trainer = SFTTrainer(model, callbacks=[PushAdapter("poet", url="https://personae.example")], ...)
trainer.train()
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from peft import PeftModel
from transformers import TrainerCallback

from personae.api.adapters.push import FILES, upload
from personae.api.commands.remote import URL, checked, server
from personae.errors import RequestError

logger = logging.getLogger(__name__)


class PushAdapter(TrainerCallback):  # type: ignore[misc]  # transformers ships no types
    """Pushes what the training made as `name` to the server at `url`, as the next version of that name.

    `key` is an API key; without it PERSONAE_API_KEY has it. `adapter` is the PEFT adapter's own name in a
    model with several; without it the active one is pushed. An admin may name the `tenant` that gets it, or
    have it `shared`. `defaults` are fields for requests that leave them out.

    It never fails the training: if the push is refused, the log says why, and the adapter stays in a folder
    below `output_dir` that `personae adapters push` takes. `record` is the server's answer afterwards.
    """

    def __init__(
        self,
        name: str,
        url: str = URL,
        *,
        key: str | None = None,
        adapter: str | None = None,
        tenant: str | None = None,
        shared: bool = False,
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.url = url
        self.adapter = adapter
        self.record: dict[str, Any] | None = None
        self._key = key or os.environ.get("PERSONAE_API_KEY")
        self._tenant = tenant
        self._fields = {"name": name, "replace": "true", **({"shared": "true"} if shared else {})}
        self._defaults = defaults

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Save the adapter and push it, in the first process of the training."""
        if not state.is_world_process_zero:
            return
        os.makedirs(args.output_dir, exist_ok=True)
        kept = Path(tempfile.mkdtemp(prefix=f"{self.name}-", dir=args.output_dir))
        folder = kept
        try:
            folder = self._saved(args, state, model, kept)
            self._push(folder)
        except (RequestError, OSError, ValueError) as error:
            reason = str(error.message if isinstance(error, RequestError) else error).rstrip(".")
            done = "was not pushed to" if self.record is None else "has no defaults at"
            logger.error("%s %s %s: %s. The adapter is in %s.", self.name, done, self.url, reason, folder)
            return
        shutil.rmtree(kept, ignore_errors=True)
        logger.info("%s is pushed to %s", self.name, self.url)

    def _saved(self, args: Any, state: Any, model: Any, folder: Path) -> Path:
        """The folder with the adapter. Where the weights are spread over processes, only a checkpoint of the
        trainer has them whole."""
        if getattr(args, "deepspeed", None) or getattr(args, "fsdp", None):
            found = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            if not (found / FILES[1]).exists():
                raise ValueError(f"{found} has no {FILES[1]}; let the trainer save at its last step.")
            return found
        unwrapped = getattr(model, "module", model)
        if not isinstance(unwrapped, PeftModel):
            raise ValueError("The model has no PEFT adapter.")
        active = unwrapped.active_adapter
        name = self.adapter or (active if isinstance(active, str) else active[0])
        if name not in unwrapped.peft_config:
            raise ValueError(f"The model has no adapter '{name}', only {', '.join(unwrapped.peft_config)}.")
        unwrapped.save_pretrained(folder, selected_adapters=[name], safe_serialization=True)
        return folder if name == "default" else folder / name

    def _push(self, folder: Path) -> None:
        with server(self.url, self._key, self._tenant) as client:
            self.record = upload(client, folder, self._fields)
            if self._defaults is not None:
                path = f"/v1/adapters/{quote(self.name, safe='')}"
                body = {"defaults": dict(self._defaults)}
                self.record = checked(client.patch(path, json=body)).json()
