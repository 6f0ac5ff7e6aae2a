"""What the worker scripts share: a session of the real stack around a function, whose report is written as JSON."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def run_in_session(body: Callable[[Any, Path], Any]) -> None:
    """Call body(session, out) on every rank and write what rank 0 returns to out/report.json.

    The script's arguments: OUT_DIR [section.key=value ...].
    """
    out, arguments = Path(sys.argv[1]), sys.argv[2:]
    from megagrpo.config.loader import load_config
    from megagrpo.observability.logs import RankLogs

    rank = int(os.environ["RANK"])
    config = load_config([*arguments, f"trainer.runs_dir={out}", "trainer.name=run"], world_size=int(os.environ["WORLD_SIZE"]))
    logs = RankLogs(rank=rank)
    from megagrpo.environment import prepare_environment

    prepare_environment(config)
    from megagrpo.session import join, start

    try:
        with start(config, logs, join(config, logs)) as session:
            report = body(session, out)
            if rank == 0:
                (out / "report.json").write_text(json.dumps(report))
    except BaseException as error:
        logs.report_failure(error, phase="the worker")
        os._exit(1)
