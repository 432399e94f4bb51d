"""Where the step costs come from."""

from pathlib import Path
from typing import Any

import msgspec

from av_triton import CostTable
from av_triton_sglang.flag import Config


def load(config: Config, arguments: Any) -> tuple[CostTable | None, str]:
    """The table and where it is from. `arguments` are SGLang's. ValueError or OSError where the file is not one."""
    path = config.cost_table or arguments.speculative_dspark_sps_table_path
    if path is None:
        return None, "none"
    try:
        fields = msgspec.json.decode(Path(path).read_bytes())
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: not a cost table ({error}); profile it again") from error
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give a cost table that exists") from error
    if isinstance(fields, dict) and "verify" not in fields:
        return CostTable.from_sps(path), f"{path} (SGLang's format)"
    return CostTable.load(path), path
