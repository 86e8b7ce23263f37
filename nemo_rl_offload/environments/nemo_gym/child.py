"""What runs in NeMo-Gym's own Python: its servers, and one task for each episode that the driver asks for.

Run as a file, by an interpreter that has nemo-gym and not this project, with the driver's process id. Messages are
lines of JSON: the first on the standard input is the global configuration, each other one an episode, `{"number": n,
"row": {...}}`. Each on the standard output is the names of the agents, once they answer, or an episode's end, with
`result`, the text of its JSON, or `error`. What servers print goes to the standard error. The input's end ends all.
"""

import asyncio
import json
import os
import signal
import sys
import threading
from typing import Any, TextIO

LOOK_S = 1.0
LONGEST_ERROR = 2000
"""Characters of an error that are told."""


def main() -> int:
    """Start the servers, and serve until the input ends."""
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)
        config, started = json.loads(sys.stdin.readline()), threading.Event()
        threading.Thread(target=_end_with_driver, args=(int(sys.argv[1]), started), daemon=True).start()
        from nemo_gym.cli.env import RunHelper
        from nemo_gym.global_config import GlobalConfigDictParserConfig, get_global_config_dict
        from omegaconf import OmegaConf

        helper = RunHelper()
        helper.start(
            GlobalConfigDictParserConfig(
                initial_global_config_dict=OmegaConf.create(config),
                skip_load_from_cli=True,
                skip_load_from_dotenv=True,
            )
        )
        try:
            told = get_global_config_dict()
            agents = [name for name, section in told.items() if hasattr(section, "get") and _is_agent(section)]
            started.set()
            _say(output, {"agents": agents})
            asyncio.run(_serve(helper, output))
        finally:
            helper.shutdown()
    return 0


def _end_with_driver(driver: int, started: threading.Event) -> None:
    """End all where the driver has ended before the input is read, which tells it later."""
    while not started.wait(LOOK_S):
        if os.getppid() != driver:
            os.killpg(0, signal.SIGKILL)


def _is_agent(section: Any) -> bool:
    try:
        return "responses_api_agents" in section
    except TypeError:
        return False


def _say(output: TextIO, message: dict[str, Any]) -> None:
    output.write(json.dumps(message) + "\n")
    output.flush()


async def _serve(helper: Any, output: TextIO) -> None:
    """Have agents run episodes, as many at once as are asked for."""
    from nemo_gym.rollout_collection import RolloutCollectionHelper

    client = RolloutCollectionHelper().setup_server_client()
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
    tasks.add(loop.create_task(_watch(helper)))
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        task = loop.create_task(_run(client, output, json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _watch(helper: Any) -> None:
    """End all where a server has ended: who asks it would try again for ever."""
    while True:
        await asyncio.sleep(LOOK_S)
        try:
            helper.poll()
        except RuntimeError as ended:
            sys.stderr.write(f"{ended}\n")
            os._exit(1)


async def _run(client: Any, output: TextIO, asked: dict[str, Any]) -> None:
    row, said = asked["row"], {"number": asked["number"]}
    try:
        response = await client.post(server_name=row["agent_ref"]["name"], url_path="/run", json=row)
        content = await response.read()
        if response.status >= 400:
            raise RuntimeError(f"HTTP {response.status}: {content.decode(errors='replace')}")
        _say(output, said | {"result": content.decode()})
    except Exception as error:  # noqa: BLE001 - told the driver
        _say(output, said | {"error": f"{type(error).__name__}: {error}"[:LONGEST_ERROR]})


if __name__ == "__main__":
    sys.exit(main())
