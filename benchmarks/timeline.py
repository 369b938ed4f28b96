# SPDX-License-Identifier: Apache-2.0
"""Draw what two ranks do during a step with dedicated owners (Z3): passes, broadcasts and reductions in flight.

    python benchmarks/timeline.py --output timeline
    python benchmarks/timeline.py --output timeline --ranks 4 --replicate 2     # HSDP

Writes into the folder: `timeline.svg`, a picture of one step; `timeline.json`, the same spans as a Chrome trace with a
process per rank (chrome://tracing, ui.perfetto.dev); `profile_rank<r>.json`, torch.profiler's trace of a later step,
where the ranges are called `hf_muon::...`. On a GPU use the profile: spans are the host's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
from html import escape
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from fsdp2_step import Model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hf_muon
from hf_muon.tracing import Span, record_spans, trace

WARM_UP_STEPS = 2  # the first forward does not know the order of the units yet
LANES = {
    "compute": ("forward", "recomputation", "backward", "newton_schulz", "optimizer"),
    "broadcast": ("broadcast",),
    "reduce": ("reduce",),
    "publish": ("replicate_broadcast",),
    "reduce over replicas": ("replicate_reduce",),
}
COLOURS = {
    "forward": "#4c78a8",
    "recomputation": "#4c78a8",
    "backward": "#e49444",
    "optimizer": "#d9d9d9",
    "newton_schulz": "#59a14f",
    "broadcast": "#85b6d9",
    "reduce": "#f1b06d",
    "replicate_broadcast": "#b279a2",
    "replicate_reduce": "#d67195",
}
WIDTH, LEFT, ROW, GAP, TEXT = 1100, 150, 16, 8, 6.2  # picture units; TEXT is the width of a letter


def record(rank: int, options: argparse.Namespace, store: str) -> None:
    """Train on this rank; rank 0 writes the spans of all, every rank its profile."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options.ranks))
    dist.init_process_group("gloo", store=dist.FileStore(store, options.ranks), rank=rank, world_size=options.ranks)
    torch.manual_seed(0)
    model = Model(options.vocabulary, options.hidden, options.layers)
    hf_muon.tag_parameters(model)
    shape = (options.ranks,) if options.replicate == 1 else (options.replicate, options.ranks // options.replicate)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    with hf_muon.dedicate_params(model, mesh):
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = hf_muon.MuonWithAuxAdam(model.named_parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(rank)

    def step() -> None:
        ids = torch.randint(options.vocabulary, (options.batch, options.seq + 1), generator=generator)
        model(ids).backward()
        with trace("optimizer", "step"):
            optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP_STEPS):
        step()
    dist.barrier()
    with record_spans() as spans:
        step()
    gathered: list[list[Span]] = [[] for _ in range(options.ranks)]
    dist.all_gather_object(gathered, spans)
    folder = Path(options.output)
    if rank == 0:
        begin = min(span.begin for spans in gathered for span in spans)
        (folder / "timeline.json").write_text(json.dumps({"traceEvents": chrome_events(gathered, begin)}))
        (folder / "timeline.svg").write_text(picture(gathered, begin))
        for index, spans in enumerate(gathered):
            waits = [span.end - span.waited for span in spans if span.waited and span.end]
            length = max(end_of(span) for span in spans) - begin
            print(f"rank {index}: waited for collectives {sum(waits) * 1e3:.1f} ms of {length * 1e3:.0f} ms")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        step()
    profiler.export_chrome_trace(str(folder / f"profile_rank{rank}.json"))
    dist.destroy_process_group()


def end_of(span: Span) -> float:
    """Return when it was over: a collective when its backend was done, work when it ended."""
    return span.done or span.end or span.begin


def lane_rows(spans: list[Span], kinds: tuple[str, ...]) -> list[list[Span]]:
    """Return the spans of some kinds in rows without overlap, in the order they began."""
    rows: list[list[Span]] = []
    for span in sorted((s for s in spans if s.kind in kinds), key=lambda s: (s.begin, -end_of(s))):
        row = next((row for row in rows if end_of(row[-1]) <= span.begin), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


def label_of(span: Span) -> str:
    """Return a short name: the unit's, and the owner's index for a collective."""
    unit = span.name.rpartition(" of ")[2].replace("the root module", "root")
    return (
        unit if span.peer < 0 else f"{unit} from {span.peer}" if "broadcast" in span.kind else f"{unit} to {span.peer}"
    )


def chrome_events(gathered: list[list[Span]], begin: float) -> list[dict]:
    """Return the spans as events of Chrome's trace format: a process per rank, threads per lane."""
    events: list[dict] = []
    for rank, spans in enumerate(gathered):
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}})
        thread = 0
        for lane, kinds in LANES.items():
            for row in lane_rows(spans, kinds):
                events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": lane}})
                for span in row:
                    place = {"pid": rank, "tid": thread, "ts": (span.begin - begin) * 1e6}
                    length = (end_of(span) - span.begin) * 1e6
                    name = f"{span.kind} {label_of(span)}"
                    args = {**dataclasses.asdict(span), "began_to_wait_us": ((span.waited or begin) - begin) * 1e6}
                    events.append({"ph": "X", "name": name, "cat": span.kind, "dur": length, "args": args, **place})
                thread += 1
    return events


def picture(gathered: list[list[Span]], begin: float) -> str:
    """Return an SVG: lanes of every rank over milliseconds; a tick below a collective marks where its wait began."""
    length = max(end_of(span) for spans in gathered for span in spans) - begin
    scale = (WIDTH - LEFT - 10) / length
    parts: list[str] = []

    def text(x: float, y: float, what: str, colour: str = "#888") -> None:
        parts.append(f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}">{escape(what)}</text>')

    def bar(span: Span, y: float) -> None:
        x, width = LEFT + (span.begin - begin) * scale, max(0.8, (end_of(span) - span.begin) * scale)
        name = f"{span.kind} {label_of(span)}: {(end_of(span) - span.begin) * 1e3:.1f} ms"
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 2}" fill="{COLOURS[span.kind]}">'
            f"<title>{escape(name)}</title></rect>"
        )
        shorter = (label_of(span), label_of(span).rpartition(".")[2])
        fitting = next((label for label in shorter if len(label) * TEXT < width), None)
        if fitting:
            text(x + 2, y + ROW - 5, fitting, "#111")
        if span.peer >= 0 and span.waited is not None:
            tick = LEFT + (span.waited - begin) * scale
            parts.append(f'<path d="M{tick:.1f} {y + ROW - 3}v4" stroke="#c00"/>')

    y = 22
    for rank, spans in enumerate(gathered):
        text(4, y + ROW - 5, f"rank {rank}")
        for lane, kinds in LANES.items():
            for index, row in enumerate(lane_rows(spans, kinds)):
                if index == 0:
                    text(52, y + ROW - 5, lane)
                for span in row:
                    bar(span, y)
                y += ROW
            y += 3 if any(span.kind in kinds for span in spans) else 0
        y += GAP
    stride = next(s for s in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if length * 1e3 / s < 12)
    for tick in range(0, int(length * 1e3) + 1, stride):
        x = LEFT + tick / 1e3 * scale
        parts.insert(0, f'<path d="M{x:.1f} 18V{y}" stroke="#8884" />')
        text(x, 12, f"{tick} ms")
    legend = [kind for kind in COLOURS if kind != "recomputation" and any(s.kind == kind for s in gathered[0])]
    for index, kind in enumerate(legend):
        x = LEFT + index * 130
        parts.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{COLOURS[kind]}"/>')
        text(x + 14, y + 9, kind.replace("_", " "))
    text(LEFT + len(legend) * 130, y + 9, "red tick: the host begins to wait")
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 16}" font-family="sans-serif" '
    return head + 'font-size="11">\n' + "\n".join(parts) + "\n</svg>\n"


def main() -> None:
    """Parse options and start the processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", required=True, help="folder for the picture and the traces")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--replicate", type=int, default=1, help="replicas (HSDP)")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    options = parser.parse_args()
    if options.ranks % options.replicate:
        parser.error(f"--ranks must be a multiple of --replicate; got {options.ranks} and {options.replicate}.")
    Path(options.output).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(record, (options, os.path.join(folder, "store")), nprocs=options.ranks)


if __name__ == "__main__":
    main()
