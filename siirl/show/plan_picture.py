"""The picture of a plan: a lane for each set of ranks, nodes left to right, arrows for rows and weights."""

import io
import textwrap
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from siirl.compiler.instructions import ROUTING
from siirl.compiler.plan import EnvStage, LinkPlan, Plan, StagePlan
from siirl.compiler.plan_instructions import Reshard, Run
from siirl.errors import ConfigError
from siirl.parallel.placement import Ranks, format_ranks
from siirl.show.credit_text import Configs, credit_words, tool_words, turn_words
from siirl.show.plan_text import home_ranks, sizes

FORMATS = (".svg", ".png")

AGENT_COLORS = ("#3b6fb6", "#d9822b", "#3f9b6c", "#a2559b", "#c04f4f", "#7a7a3a", "#4a9fb0", "#8c6d4f")
_INK, _FAINT, _LANE_COLOR, _WEIGHT_COLOR = "#22262b", "#6b737c", "#f3f4f6", "#b03a48"
_BOX_W, _BOX_H, _GAP_X, _GAP_Y = 1.7, 0.98, 0.84, 0.34  # inches
_NAME, _TEXT, _CHARS = 9.5, 9, 22  # points: 12 pixels of a page; characters in a line of a box
_PLACE = "rows"
"""Words that are not seen."""
_MARGIN, _HEADER, _TRACK, _NOTE = 0.3, 0.42, 0.34, 0.22
_STRIPE, _LINE = 0.16, 0.21
"""Where the number of the agent stands; from line to line."""

Point = tuple[float, float]
Way = tuple[str, str, int]
"""(parent, child, column): where an arrow passes a column in which neither of its nodes is."""


@dataclass
class _Lane:
    """Nodes on the same ranks."""

    ranks: Ranks
    slots: dict[int, list[str | Way]] = field(default_factory=dict)
    """Column -> nodes and passing arrows in it, from top to bottom."""
    tracks: int = 0  # weight arrows that run along its bottom
    loops: int = 0  # ways back that run along its top
    bottom: float = 0.0
    top: float = 0.0

    @property
    def height(self) -> float:
        fullest = max(len(slots) for slots in self.slots.values())
        return self.head + fullest * (_BOX_H + _GAP_Y) + max(_TRACK * self.tracks, 0.05)

    @property
    def head(self) -> float:
        """What its title and the ways back take of the height."""
        return _HEADER + _TRACK * self.loops


@dataclass(frozen=True)
class _Canvas:
    """Where everything is, in inches; y grows upwards."""

    lanes: list[_Lane]
    centers: dict[str | Way, Point]
    width: float
    top: float


def draw(plan: Plan, path: Path, configs: Configs) -> None:
    """Write the picture as SVG or PNG, by the file's ending. Needs matplotlib, no display.

    configs: the resolved configuration of each kept node; nodes without one are drawn without its details.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--draw {path}: the ending says the format. End it with {' or '.join(FORMATS)}.")
    _save(_figure(plan, configs), path, path.suffix.lower().removeprefix("."))


def drawn_as_svg(plan: Plan, configs: Configs, places: bool = False) -> str:
    """The picture as the text of an SVG file. places: edges without words have an unseen place for them."""
    file = io.BytesIO()
    _save(_figure(plan, configs, places), file, "svg")
    return file.getvalue().decode()


def node_mark(plan: Plan, name: str) -> str:
    """The id of the ground of a node's box in the SVG, for a page that colours it."""
    return f"node-{list(plan.nodes).index(name)}"


def link_mark(plan: Plan, name: str) -> str:
    """The id of the words on a weight link."""
    return f"link-{list(plan.links).index(name)}"


def edge_mark(plan: Plan, parent: str, child: str) -> str:
    """The id of the words on an arrow between nodes."""
    return f"edge-{list(plan.nodes).index(parent)}-{list(plan.nodes).index(child)}"


def _save(figure: Any, file: Any, kind: str) -> None:
    import matplotlib

    # The same plan gives the same file.
    metadata = {"Date": None} if kind == "svg" else {}
    with matplotlib.rc_context({"svg.hashsalt": "siirl", "svg.fonttype": "none"}):
        figure.savefig(file, format=kind, dpi=150, facecolor="white", metadata=metadata)


def _figure(plan: Plan, configs: Configs, places: bool = False) -> Any:
    from matplotlib.figure import Figure

    edges = _edges(plan)
    canvas = _arrange(plan, edges)
    notes = _NOTE * len(plan.pruned) + 0.1
    size = (canvas.width, canvas.top + 0.5 + notes)
    figure = Figure(figsize=size)
    axes = figure.add_axes((0, 0, 1, 1))
    # Limits are fixed, so patches are added as artists: axes.add_patch would look for the extent of each.
    axes.set(xlim=(0, canvas.width), ylim=(-notes, canvas.top + 0.5))
    axes.axis("off")
    counts = f"{len(plan.nodes)} nodes on {plan.world_size} rank{'s' * (plan.world_size > 1)}"
    title = f"{plan.dag_id}: {counts}, one training step"
    axes.text(_MARGIN, canvas.top + 0.24, title, size=11.5, color=_INK, weight="bold", va="center")
    _draw_legend(axes, plan, canvas, _MARGIN + 0.1 * len(title))
    stages = _stages(plan)
    for lane in canvas.lanes:
        _draw_lane(axes, lane, canvas.width)
    for link, track in _tracks(plan, canvas.lanes):
        _draw_weights(axes, plan, link, track, canvas)
    for stage, track in _loops(plan, canvas.lanes):
        _draw_loop(axes, stage, track, canvas)
    for parent, child in edges:
        way = _way(parent, child, _columns(plan), canvas)
        if parent in stages and child in stages and stages[parent].route is not None:
            label = f"{_cut(_short(stages[parent].route))}:\n{_cut(child)}"
            _draw_edge(axes, way, label, dashed=True, clear=_before_weights(plan, way[-1], canvas))
        else:
            words = _draw_edge(axes, way, _label(plan, parent, child) or (_PLACE if places else ""))
            if words is not None:
                words.set_gid(edge_mark(plan, parent, child))
    for node in plan.nodes:
        _draw_node(axes, plan, node, canvas.centers[node], configs)
    for line, (node, why) in enumerate(plan.pruned.items()):
        axes.text(
            _MARGIN, -0.12 - _NOTE * line, f"skipped: {node} ({why})", size=_TEXT, color=_FAINT, va="center"
        )
    return figure


def _columns(plan: Plan) -> dict[str, int]:
    """Node -> the longest way to it from a node that depends on nothing."""
    columns: dict[str, int] = {}
    for name, node in plan.nodes.items():
        columns[name] = max((columns[parent] + 1 for parent in node.dependencies), default=0)
    return columns


def _edges(plan: Plan) -> list[tuple[str, str]]:
    """Dependencies, without those that follow from others."""
    above: dict[str, set[str]] = {}
    edges: list[tuple[str, str]] = []
    for name, node in plan.nodes.items():
        implied = set().union(*(above[parent] for parent in node.dependencies))
        above[name] = implied | set(node.dependencies)
        edges += [(parent, name) for parent in node.dependencies if parent not in implied]
    return edges


def _arrange(plan: Plan, edges: list[tuple[str, str]]) -> _Canvas:
    columns = _columns(plan)
    lanes = _fill_lanes(plan, edges, columns)
    for link, _ in _tracks(plan, lanes):
        _lane_of(lanes, plan.models[link.source].ranks).tracks += 1
    for stage, _ in _loops(plan, lanes):
        _lane_with(lanes, stage.back_to[0]).loops += 1
    bottom = 0.0
    for lane in reversed(lanes):
        lane.bottom, lane.top = bottom, bottom + lane.height
        bottom = lane.top + 0.22
    left = _MARGIN + 0.45 + _BOX_W / 2
    centers: dict[str | Way, Point] = {}
    for lane in lanes:
        for column, slots in lane.slots.items():
            free = lane.height - lane.head - _TRACK * lane.tracks
            step = free / len(slots)
            for index, slot in enumerate(slots):
                y = lane.top - lane.head - (index + 0.5) * step
                centers[slot] = (left + column * (_BOX_W + _GAP_X), y)
    width = left + max(columns.values()) * (_BOX_W + _GAP_X) + _BOX_W / 2 + _MARGIN + 0.15
    return _Canvas(lanes, centers, max(width, 7.0), lanes[0].top)


def _fill_lanes(plan: Plan, edges: list[tuple[str, str]], columns: dict[str, int]) -> list[_Lane]:
    """Lanes from top to bottom by first rank, each slot near the slots that its arrows come from."""
    ranks = home_ranks(plan)
    order = sorted(dict.fromkeys(ranks.values()), key=lambda r: (r[0], -len(r), r))
    lanes = {members: _Lane(members) for members in order}
    for node in plan.nodes:
        lanes[ranks[node]].slots.setdefault(columns[node], []).append(node)
    before: dict[str | Way, list[str | Way]] = {}
    for parent, child in edges:
        last: str | Way = parent
        for column in range(columns[parent] + 1, columns[child]):
            way = (parent, child, column)
            lanes[ranks[parent]].slots.setdefault(column, []).append(way)
            before.setdefault(way, []).append(last)
            last = way
        before.setdefault(child, []).append(last)
    height: dict[str | Way, float] = {}
    for column in range(max(columns.values()) + 1):
        for lane in lanes.values():
            slots = lane.slots.get(column, [])
            middle = {
                slot: sum(height[other] for other in before[slot]) / len(before[slot])
                if slot in before
                else 0.0
                for slot in slots
            }
            slots.sort(key=lambda slot: middle[slot])
            for index, slot in enumerate(slots):
                height[slot] = (index + 0.5) / len(slots) + list(lanes).index(lane.ranks)
    return list(lanes.values())


def _lane_of(lanes: list[_Lane], ranks: Ranks) -> _Lane:
    return next(lane for lane in lanes if lane.ranks == ranks)


def _tracks(plan: Plan, lanes: list[_Lane]) -> list[tuple[LinkPlan, int]]:
    """Each weight link, and which track along the bottom of its trainer's lane it takes."""
    taken: dict[Ranks, int] = {}
    tracks = []
    for link in plan.links.values():
        ranks = plan.models[link.source].ranks
        tracks.append((link, taken.get(ranks, 0)))
        taken[ranks] = taken.get(ranks, 0) + 1
    return tracks


def _stages(plan: Plan) -> dict[str, StagePlan]:
    """Node -> its stage, of nodes in interactions."""
    return {stage.node: stage for talk in plan.interactions.values() for stage in talk.stages}


def _loops(plan: Plan, lanes: list[_Lane]) -> list[tuple[StagePlan, int]]:
    """Each stage after which an episode may go back, and the track along the top of a lane of that way."""
    taken: dict[Ranks, int] = {}
    loops = []
    for stage in _stages(plan).values():
        if stage.back_to:
            ranks = _lane_with(lanes, stage.back_to[0]).ranks
            loops.append((stage, taken.get(ranks, 0)))
            taken[ranks] = taken.get(ranks, 0) + 1
    return loops


def _lane_with(lanes: list[_Lane], node: str) -> _Lane:
    return next(lane for lane in lanes if any(node in slots for slots in lane.slots.values()))


def _short(reference: str | None) -> str:
    """The function's name in "file.py:fn"."""
    return (reference or "").rpartition(":")[2]


def _cut(text: str, most: int = 9) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}\u2026"


def _before_weights(plan: Plan, end: Point, canvas: _Canvas) -> float:
    """How far before an arrow's end the weights that go into nodes of its column leave room."""
    into = [_weights_side(plan, link, track, canvas) for link, track in _tracks(plan, canvas.lanes)]
    return max((end[0] - side for side in into if 0 < end[0] - side < _GAP_X), default=0.2) + 0.06


def _way(parent: str, child: str, columns: dict[str, int], canvas: _Canvas) -> list[Point]:
    """The points that an arrow passes: out of the parent's right side, into the child's left side."""
    (x, y), (end_x, end_y) = canvas.centers[parent], canvas.centers[child]
    points = [(x + _BOX_W / 2, y)]
    for column in range(columns[parent] + 1, columns[child]):
        way_x, way_y = canvas.centers[parent, child, column]
        points += [(way_x - _BOX_W / 2, way_y), (way_x + _BOX_W / 2, way_y)]
    return [*points, (end_x - _BOX_W / 2, end_y)]


def _label(plan: Plan, parent: str, child: str) -> str:
    """What moves from the parent's layout before the child runs: turns of an episode, or rows."""
    for interaction in plan.interactions.values():
        if {parent, child} <= {stage.node for stage in interaction.stages}:
            homes = home_ranks(plan)
            return "" if homes[parent] == homes[child] else "turns"
    runs = {ins.node for ins in plan.instructions if isinstance(ins, Run)}
    if not {parent, child} <= runs:
        return ""
    max_lag = plan.nodes[parent].max_lag
    age = f"up to {max_lag} step{'s' if max_lag > 1 else ''} old" if max_lag else ""
    return "\n".join(filter(None, (age, _moved(plan, parent, child))))


def _moved(plan: Plan, parent: str, child: str) -> str:
    names = [
        key.name
        for ins in plan.before(child)
        if isinstance(ins, Reshard) and plan.routes[ins.route].source == plan.run_of(parent).target
        for key in ins.keys
    ]
    if not names:
        return ""
    if set(names) <= set(ROUTING):
        return "waits"
    return f"reshard\n{len(names)} field{'s' if len(names) > 1 else ''}"


def _agents(plan: Plan) -> dict[int, str]:
    """Agent -> what the legend calls it: its number, and the first node that speaks for it."""
    speakers: dict[int, str] = {}
    talking = [stage.node for talk in plan.interactions.values() for stage in talk.speaking]
    rollouts_first = sorted(plan.nodes, key=lambda name: not plan.nodes[name].spec.is_rollout)
    for name in (*talking, *rollouts_first):
        speakers.setdefault(plan.nodes[name].agent, name)
    return {agent: f"agent {agent}: {speakers[agent]}" for agent in sorted(speakers)}


def _draw_legend(axes: Any, plan: Plan, canvas: _Canvas, left: float) -> None:
    """Which colour is which agent, right of `left`; nothing to say of a single one. Without the names of
    nodes, or not at all, where there is no room for them.
    """
    from matplotlib.patches import Rectangle

    names = _agents(plan)
    wide = {agent: 0.085 * len(name) + 0.32 for agent, name in names.items()}
    if sum(wide.values()) > canvas.width - left:
        names = {agent: str(agent) for agent in names}
        wide = dict.fromkeys(names, 0.5)
    if sum(wide.values()) > canvas.width - left:
        return  # the boxes have the numbers, too
    x, y = canvas.width - _MARGIN, canvas.top + 0.24
    for agent, shown in reversed(names.items() if len(names) > 1 else ()):
        x -= wide[agent]
        color = AGENT_COLORS[agent % len(AGENT_COLORS)]
        axes.add_artist(Rectangle((x, y - 0.07), 0.14, 0.14, fc=color, ec="none"))
        axes.text(x + 0.2, y, shown, size=9, color=_INK, va="center")


def _draw_lane(axes: Any, lane: _Lane, width: float) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.12"
    corner, size = (_MARGIN - 0.1, lane.bottom), (width - 2 * _MARGIN + 0.2, lane.height)
    axes.add_artist(FancyBboxPatch(corner, *size, boxstyle=style, fc=_LANE_COLOR, ec="none"))
    text = f"rank{'s' if len(lane.ranks) > 1 else ''} {format_ranks(lane.ranks)}"
    axes.text(_MARGIN + 0.45, lane.top - 0.2, text, size=9.5, color=_FAINT, va="center", weight="bold")


def _draw_node(axes: Any, plan: Plan, name: str, center: Point, configs: Configs) -> None:
    from matplotlib.patches import FancyBboxPatch, Rectangle

    node, (x, y) = plan.nodes[name], center
    color = AGENT_COLORS[node.agent % len(AGENT_COLORS)]
    corner = (x - _BOX_W / 2, y - _BOX_H / 2)
    style = "round,pad=0,rounding_size=0.1"
    outline = FancyBboxPatch(corner, _BOX_W, _BOX_H, boxstyle=style, fc="white", ec=color, lw=1.6, zorder=3)
    axes.add_artist(outline)
    tint = FancyBboxPatch(corner, _BOX_W, _BOX_H, boxstyle=style, fc=color, ec="none", alpha=0.1, zorder=3)
    tint.set_gid(node_mark(plan, name))
    axes.add_artist(tint)
    stripe = Rectangle(corner, _STRIPE, _BOX_H, fc=color, ec="none", zorder=4)
    axes.add_artist(stripe)
    stripe.set_clip_path(outline)
    if len({one.agent for one in plan.nodes.values()}) > 1:
        style = {"size": _TEXT, "color": "white", "ha": "center", "va": "center", "zorder": 5}
        axes.text(corner[0] + _STRIPE / 2, y, str(node.agent), **style)
    details = textwrap.wrap(_detail(plan, name, configs), _CHARS, max_lines=3, placeholder="\u2026")
    lines = [
        (_cut(name, _CHARS), _NAME, _INK),
        *((_cut(text, _CHARS), _TEXT, _FAINT) for text in (node.op, *details)),
    ]
    for place, (text, size, ink) in enumerate(lines):
        down = (place - (len(lines) - 1) / 2) * min(_LINE, 0.9 * _BOX_H / len(lines))
        axes.text(x + _STRIPE / 2, y - down, text, size=size, color=ink, ha="center", va="center", zorder=5)


def _detail(plan: Plan, name: str, configs: Configs) -> str:
    """The last line of a node's box: what it runs on, tools, when it trains, or whose rewards it adds up."""
    node, stage = plan.nodes[name], _stages(plan).get(name)
    model = plan.models.get(node.model or "")
    if isinstance(stage, EnvStage):
        return _short(stage.acts_by) or "the same environment"
    tools = tool_words(name, configs).partition(",")[0] if stage is not None else ""
    if model:
        runs_on = f"{model.backend}, {sizes(model)}"
    elif stage is not None and stage.policy != stage.agent:
        runs_on = f"with the policy of agent {stage.policy}"
    else:
        runs_on = credit_words(plan, name, configs) or _short(node.executable) or "no model"
    return "; ".join(filter(None, (runs_on, tools, turn_words(plan, name, configs))))


def _draw_loop(axes: Any, stage: StagePlan, track: int, canvas: _Canvas) -> None:
    """The way back of episodes: from a stage's right side, along the top of the lane, into a left side."""
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Curve

    (x, y), (end_x, end_y) = canvas.centers[stage.node], canvas.centers[stage.back_to[0]]
    lane, color = _lane_with(canvas.lanes, stage.back_to[0]), AGENT_COLORS[stage.agent % len(AGENT_COLORS)]
    high = lane.top - _HEADER - _TRACK * (track + 0.3)
    right, left = x + _BOX_W / 2, end_x - _BOX_W / 2
    out, back = right + 0.2 + 0.1 * track, left - 0.2 - 0.1 * track
    points = [
        (right, y + 0.24),
        (out, y + 0.24),
        (out, high),
        (back, high),
        (back, end_y + 0.24),
        (left, end_y + 0.24),
    ]
    arrow = FancyArrowPatch(path=Curve(points), arrowstyle="-|>", mutation_scale=11, zorder=2)
    arrow.set(color=color, linewidth=1.4)
    axes.add_artist(arrow)
    until = f" until {_short(stage.until)}" if stage.until else ""
    box = {"boxstyle": "round,pad=0.15", "fc": _LANE_COLOR, "ec": "none"}
    others = f" with {' and '.join(stage.back_to[1:])}" if stage.back_to[1:] else ""
    text = f"again{others}{until}, {stage.max_turns} times in all at most"
    axes.text(
        (out + back) / 2, high, text, size=_TEXT, color=color, ha="center", va="center", bbox=box, zorder=3
    )


def _draw_edge(
    axes: Any, points: list[Point], label: str, dashed: bool = False, clear: float | None = None
) -> Any:
    """A curve that leaves and enters horizontally; returns its words. dashed: taken by some episodes. clear:
    how far before the curve's end the label ends.
    """
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Curve

    vertices, codes = [points[0]], [Curve.MOVETO]
    for (x, y), (next_x, next_y) in pairwise(points):
        middle = (x + next_x) / 2
        vertices += [(middle, y), (middle, next_y), (next_x, next_y)]
        codes += [Curve.CURVE4] * 3
    style: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 11, "color": _INK, "lw": 1.1, "zorder": 2}
    style["linestyle"] = (0, (4, 2)) if dashed else "solid"
    axes.add_artist(FancyArrowPatch(path=Curve(vertices, codes), **style))
    if not label:
        return None
    (x, y), (next_x, next_y) = points[-2:]
    along = 0.58  # nearer the child, clear of where arrows fan out
    rise = 3 * along**2 - 2 * along**3
    place = (
        x + (next_x - x) * (0.5 + 4 * (along - 0.5) ** 3 + (along - 0.5) / 2),
        y + (next_y - y) * rise,
    )
    side = "center"
    if clear is not None:
        place, side = (next_x - clear, place[1]), "right"
    box = {"boxstyle": "round,pad=0.12", "fc": _LANE_COLOR, "ec": "none", "alpha": 0.9}
    style = {"size": _TEXT, "color": _INK, "bbox": box, "linespacing": 1.05, "zorder": 6}
    if label == _PLACE:
        box["alpha"] = style["alpha"] = 0
    return axes.text(*place, label, ha=side, va="center", **style)


def _weights_side(plan: Plan, link: LinkPlan, track: int, canvas: _Canvas) -> float:
    """Where the arrow of a link goes up, left of the rollout that it ends at."""
    return canvas.centers[plan.models[link.target].node][0] - _BOX_W / 2 - 0.2 - 0.1 * track


def _draw_weights(axes: Any, plan: Plan, link: LinkPlan, track: int, canvas: _Canvas) -> None:
    """A dashed arrow from below the trainer, along its lane's bottom and up into the rollout's left side."""
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Curve

    source, target = plan.models[link.source], plan.models[link.target]
    (x, y), (end_x, end_y) = canvas.centers[source.node], canvas.centers[target.node]
    low = _lane_of(canvas.lanes, source.ranks).bottom + _TRACK * (track + 0.55)
    side = _weights_side(plan, link, track, canvas)
    points = [
        (x, y - _BOX_H / 2),
        (x, low),
        (side, low),
        (side, end_y - 0.2),
        (end_x - _BOX_W / 2, end_y - 0.2),
    ]
    arrow = FancyArrowPatch(path=Curve(points), arrowstyle="-|>", mutation_scale=11, zorder=2)
    arrow.set(color=_WEIGHT_COLOR, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.add_artist(arrow)
    text = f"weights, if newer ({link.kind})"
    box = {"boxstyle": "round,pad=0.15", "fc": _LANE_COLOR, "ec": "none"}
    label = axes.text(
        x - _BOX_W, low, text, size=_TEXT, color=_WEIGHT_COLOR, ha="center", va="center", bbox=box, zorder=3
    )
    label.set_gid(link_mark(plan, link.name))
