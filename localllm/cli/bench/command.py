"""`localllm bench`: measure speed, and how close it comes to the hardware's limits."""

import shutil
import sys
from typing import TYPE_CHECKING, Annotated

from localllm.cli.bench.flags import (
    BenchDraftFlags,
    RandomWeightFlags,
    ReportFlags,
    SuiteFlags,
    WorkloadFlags,
    read_suites,
)
from localllm.cli.draw.output import is_terminal, show_controls, write_stdout
from localllm.cli.flags import common
from localllm.cli.flags.engine_flags import EngineFlags
from localllm.cli.flags.groups import takes_flags
from localllm.drafting.speculation_config import SpeculationConfig
from localllm.errors import ExitCode

if TYPE_CHECKING:
    from localllm.bench.report import Report


@takes_flags
def bench(
    model: Annotated[
        str | None, common.model("Alias, org/name, folder or GGUF file; pocket if not given.")
    ] = None,
    *,
    workload: WorkloadFlags,
    drawn: RandomWeightFlags,
    suites: SuiteFlags,
    files: ReportFlags,
    engine: EngineFlags,
    drafts: BenchDraftFlags,
) -> int:
    """Measure speed, as a share of what this machine's memory and arithmetic allow.

    Without a flag that selects a suite, it measures prefill and decode.
    """
    from localllm.cli.bench.runs import bench_kernels, bench_model, bench_server

    speculation = drafts.config()
    asked = read_suites(workload, suites, drafts)
    files.check()
    if suites.url is not None:
        measured = bench_server(suites.url, model, asked)
    elif suites.kernels:
        measured = bench_kernels(model, asked)
    else:
        drafted = speculation if asked.spec or suites.verify else SpeculationConfig("off")
        measured = bench_model(model, drawn, engine.config(asked.num_seqs, drafted), asked)
    _write(measured.report, files)
    return ExitCode.SIGINT if measured.was_interrupted else ExitCode.OK


def _write(report: "Report", files: ReportFlags) -> None:
    from localllm.cli.bench.table import report_text

    width = shutil.get_terminal_size().columns if is_terminal(sys.stdout) else None
    write_stdout(show_controls(report_text(report, width)))
    if files.json_file is not None:
        report.write(files.json_file)
    if files.plot is not None:
        from localllm.bench.plot import write_plot

        write_plot(report, files.plot)
