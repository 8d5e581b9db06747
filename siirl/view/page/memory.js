// Memory of each phase: what the plan estimated, part by part, over what was measured on the fullest rank.

const BARS = { left: 190, right: 70, row: 34, top: 24, bar: 11 };

function gib(value) { return value >= 0.1 ? Number(value.toPrecision(4)) + " GiB" : Number((value * 1024).toPrecision(3)) + " MiB"; }
function at(measured) { return measured ? gib(measured[0]) + " in step " + measured[1] : "-"; }

function memoryBars(memory) {
  const { left, right, row, top, bar } = BARS, width = roomWide(), phases = memory.phases;
  const sizes = phases.flatMap(phase => [phase.estimate && phase.estimate.device, ...["peak", "reserved", "device"].map(kind => phase[kind] && phase[kind][0])]);
  const limit = memory.on_host ? 0 : memory.device_gib || 0, most = Math.max(1e-3, limit, ...sizes.filter(Boolean)) * 1.02;
  const kinds = [...new Set(phases.flatMap(phase => phase.estimate ? phase.estimate.parts.map(part => part[1]) : []))];
  const color = kind => COLORS[kinds.indexOf(kind) % COLORS.length], x = value => left + value / most * (width - left - right);
  const high = top + phases.length * row + 8;
  const svg = draw("svg", { id: "memory-bars", role: "img", viewBox: `0 0 ${width} ${high}`, width, height: high,
    "aria-label": "memory of each phase, estimated and measured; the table below has the numbers" });
  const block = (from, value, y, fill, text, opacity) => {
    const box = draw("rect", { class: "span", x: x(from).toFixed(1), y, width: Math.max(0.8, x(from + value) - x(from)).toFixed(1), height: bar, fill, "fill-opacity": opacity });
    box.addEventListener("pointermove", event => tip(text, event.clientX, event.clientY));
    box.addEventListener("pointerleave", () => tip(""));
    svg.append(box);
  };
  for (const value of ticks(0, most, 8)) svg.append(
    draw("line", { class: "tick", x1: x(value), x2: x(value), y1: top - 6, y2: high }),
    draw("text", { class: "axis", x: x(value), y: 13, "text-anchor": "middle" }, short(value) + " GiB"));
  phases.forEach((phase, place) => {
    const y = top + place * row, title = phase.name.length > 26 ? phase.name.slice(0, 25) + "\u2026" : phase.name;
    svg.append(draw("text", { x: 4, y: y + 16 }, draw("title", {}, phase.name), title));
    let from = 0;
    for (const [model, kind, size] of phase.estimate ? phase.estimate.parts : []) {
      block(from, size, y, color(kind), phase.name + ", estimated\n" + model + ": " + kind + "\n" + gib(size), 0.85);
      from += size;
    }
    const rest = phase.estimate ? phase.estimate.device - from : 0;
    if (rest > 0) block(from, rest, y, "#8a929b", phase.name + ", estimated\nslack of the allocator and the worker's context\n" + gib(rest), 0.5);
    for (const [kind, text, opacity] of [["device", "in use on the device", 0.25], ["reserved", "reserved by the trainer's allocator", 0.3], ["peak", "the trainer's tensors", 0.7]]) {
      if (phase[kind]) block(0, phase[kind][0], y + bar + 1, "var(--ink)", phase.name + ", measured\n" + text + "\n" + at(phase[kind]), opacity);
    }
  });
  if (limit) svg.append(draw("line", { class: "limit", x1: x(limit), x2: x(limit), y1: top - 8, y2: high }));
  const legend = make("div", { class: "legend" }, kinds.map(kind => make("span", {}, make("i", { class: "patch", color: color(kind) }), kind)),
    memory.on_host ? null : make("span", {}, make("i", { class: "patch", color: "var(--ink)" }), "measured: tensors, then reserved, then the whole device"),
    limit ? make("span", {}, "| the device: " + gib(limit) + (memory.assumed ? " (assumed: trainer.device_memory_gib says it)" : "")) : null);
  return make("div", { class: "box lanes", tabindex: 0 }, legend, svg);
}

function memoryTable(memory) {
  if (memory.on_host) return phaseTable(["phase", "ranks", "host memory, estimated", "of it tensors"],
    memory.phases.map(({ name, estimate }) => [name, ...(estimate ? [estimate.ranks, gib(estimate.device), gib(estimate.tensors)] : ["", "-", "-"])]));
  const head = ["phase", "ranks", "tensors, estimated", "measured", "", "device, estimated", "reserved by torch", "in use on the device", "waits in host memory, estimated"];
  const rows = memory.phases.map(phase => {
    const told = phase.estimate, off = told && phase.peak && told.tensors ? phase.peak[0] / told.tensors - 1 : null;
    return [phase.name, told ? told.ranks : "", told ? gib(told.tensors) : "-", at(phase.peak), off === null ? "" : (off > 0 ? "+" : "") + (100 * off).toFixed(0) + "%",
      told ? gib(told.device) : "-", phase.reserved ? gib(phase.reserved[0]) : "-", phase.device ? gib(phase.device[0]) : "-", told && told.host ? gib(told.host) : "-"];
  });
  return phaseTable(head, rows);
}

function phaseTable(head, rows) {
  return make("div", { class: "box scroll", tabindex: 0 }, make("table", { id: "phases" }, make("tr", {}, head.map(title => make("th", { scope: "col" }, title))),
    rows.map(cells => make("tr", {}, cells.map(cell => make("td", {}, cell))))));
}

section("memory", "Memory", ["memory"], () => {
  const memory = run().memory;
  if (!memory) return [make("p", { class: "box" }, "The memory of this run cannot be shown.")];
  const host = memory.host ? "A worker process took at most " + at(memory.host) + " of its machine's memory." : "";
  const parts = [make("div", { class: "box", id: "memory-text" }, [...memory.text, host].filter(Boolean).map(text => make("p", {}, text)))];
  if (memory.phases.length) parts.push(make("p", { class: "faint" },
    memory.on_host ? "Estimated when the run started, of all processes together."
      : "Above: estimated when the run started, on the ranks that the phase takes most of. Below it: measured, the most of all ranks and steps."),
    memoryBars(memory), memoryTable(memory));
  return parts;
});
