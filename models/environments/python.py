"""Tool `python` for policies: each call runs a separate program in a sandbox and returns its output and last value.

Calls share no state. An answer therefore depends only on its call, and earlier calls are never run again. Errors of a
program are reported to the policy. An episode fails only if the sandbox itself fails.
"""

from collections.abc import Callable, Sequence
from typing import Final

from rheostat.infra.episode_runner import ToolBox, ToolError, build_schemas, parse_step, parse_turn
from rheostat.infra.processes.episodes import DescribedTools, EnvironmentMessage, EnvironmentStep, EpisodeRequest
from rheostat.infra.processes.programs import Program, Programs, SandboxFailed
from rheostat.models.config.environments import PythonEnvironment

PROGRAM: Final = "program.py"
CELL_PROGRAM: Final = """
import ast, sys, traceback, types

def show():
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    source = open("program.py", encoding="utf-8").read()
    tree = compile(source, "program.py", "exec", ast.PyCF_ONLY_AST)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "program.py", "exec"), main.__dict__)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "program.py", "eval"), main.__dict__)
        if value is not None:
            print(repr(value))

sys.stdout.reconfigure(line_buffering=True)
try:
    show()
except SystemExit:
    raise
except BaseException as error:
    inner = error.__traceback__
    while inner is not None and inner.tb_frame.f_code.co_filename == "<string>":
        inner = inner.tb_next
    print(*traceback.format_exception(type(error), error, inner, limit=-3), sep="", end="")
"""
"""Program that runs code like a notebook cell. It prints the value of the last expression, or the end of the traceback
if the code fails."""


class PythonTool:
    """Environment that runs the programs in the policy's calls of the tool `python`, in a sandbox."""

    def __init__(self, settings: PythonEnvironment, *, describes: DescribedTools) -> None:
        """Prepare the sandbox without starting it. Raises BadInput if no sandbox is available."""
        self._programs = Programs(
            settings.python,
            where=settings.run.where,
            seconds=settings.step_seconds,
            memory_bytes=settings.memory_mib << 20,
        )
        self._seconds, self._left = settings.step_seconds, 0.0
        self._box = ToolBox([self._tool()])
        self.schemas: Sequence[object] = build_schemas(self._box.tools) if describes != "none" else []
        """Schema of the only tool, or an empty list if `describes` is "none"."""

    def ready(self) -> None:
        """Start the sandbox. Raises BadInput if it cannot be started."""
        self._programs.start()

    def kill(self) -> None:
        """Kill the sandbox."""
        self._programs.close()

    def step(self, asked: EpisodeRequest) -> tuple[EnvironmentStep | None, str | None]:
        """Run the programs in the last turn of an episode. A turn without a call ends the episode.

        Returns the answer and None, or None and the reason if the sandbox failed. Raises WorkerLost if the sandbox was
        killed from outside.
        """
        if not asked.turns:
            return EnvironmentStep((), done=False), None
        self._left = self._seconds
        try:
            observation = parse_step(self._box.step(parse_turn(asked.turns[-1], len(asked.turns) - 1)), role="tool")
        except SandboxFailed as error:
            return None, f"the sandbox failed: {error}"
        return EnvironmentStep(
            tuple(EnvironmentMessage(**message) for message in observation["messages"]), done=observation["done"]
        ), None

    def end(self, closed: Sequence[str]) -> None:
        """Do nothing. Other environments release an episode's state here, but this tool keeps none."""

    def _tool(self) -> Callable[[str], str]:
        def python(code: str) -> str:
            """
            Run a Python program. Returns what it prints, and the value of its last line if that is an expression.
            Each call is a new program, which sees no variables or files of earlier calls.

            Args:
                code: The program.
            """
            return self._format_output(code)

        return python

    def _format_output(self, code: object) -> str:
        """Run a program and return its output, followed by the error if the program failed. Raises ToolError if the
        turn's time is used up."""
        if not isinstance(code, str):
            raise ToolError("python: expected a text as code")
        if self._left <= 0:
            raise ToolError("no time is left in this turn")
        program = Program(("-c", CELL_PROGRAM), {PROGRAM: code}, shows_errors=True)
        ran = self._programs.run(program, seconds=self._left)
        self._left -= ran.seconds
        if not ran.ending:
            return ran.output or "(no output)"
        return f"{ran.output}{'' if ran.output[-1:] in ('', chr(10)) else chr(10)}Error: {ran.ending}"
