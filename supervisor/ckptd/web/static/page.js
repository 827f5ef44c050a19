// What does a run look like? Draws the document of /api/overview, again and again, or the one inside of a report once.
"use strict";
(() => {
  const POLL_MS = 5000;
  const GROUPS = [
    ["productive", ["productive"], "--productive"],
    ["checkpoint stall", ["checkpoint_stall"], "--checkpoint_stall"],
    ["wasted progress", ["wasted_progress"], "--wasted_progress"],
    ["restarting", ["detect", "stop", "launch", "init", "restore", "first_step"], "--restart"],
    ["waiting for devices", ["wait_for_devices"], "--wait"],
    ["startup", ["startup"], "--startup"],
    ["drain and other", ["drain", "other"], "--ending"],
  ];
  const PARTS = ["detect", "stop", "wait", "launch", "init", "restore", "first_step"];
  const TERMS = [["save", "--checkpoint_stall"], ["rework", "--wasted_progress"], ["restart", "--restart"]];
  const $ = (id) => document.getElementById(id);
  const words = (name) => name.replaceAll("_", " ");
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const faint = (name) => `${color(name)}40`;

  // --- numbers and words ---------------------------------------------------------------------------------------------

  const digits = (value, n = 3) => (value >= 10 ** n ? String(Math.round(value)) : String(Number(value.toPrecision(n))));
  function seconds(value) {
    if (value === null || value === undefined) return "-";
    for (const [limit, unit, size] of [[1, "ms", 1e-3], [120, "s", 1], [7200, "min", 60], [172800, "h", 3600]]) {
      if (value < limit) return `${digits(value / size)} ${unit}`;
    }
    return value < 3.2e9 ? `${digits(value / 86400)} d` : "> 100 years";
  }
  const share = (value) => (value === null || value === undefined ? "-" : `${(100 * value).toFixed(1)} %`);
  function bytes(value) {
    for (const unit of ["B", "KiB", "MiB", "GiB"]) {
      if (value < 1024) return `${digits(value, 4)} ${unit}`;
      value /= 1024;
    }
    return `${digits(value, 4)} TiB`;
  }
  const when = (at) => (at ? new Date(at * 1000).toLocaleString() : "-");
  const number = (value) => value.toLocaleString("en");

  // Codes that colour a terminal.
  const plain = (text) => text.replace(/\x1b\[[0-?]*[ -/]*[@-~]/g, "");

  // --- elements: text only, so that nothing that a job says is taken for markup -------------------------------------------

  function element(tag, text, attributes = {}) {
    const made = document.createElement(tag);
    if (text !== null && text !== undefined) made.textContent = text;
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  }
  function fill(target, children) { target.replaceChildren(...children); }
  function table(id, heads, rows, nothing) {
    const target = $(id);
    if (!rows.length) { fill(target, nothing ? [element("caption", nothing, { class: "empty" })] : []); return; }
    const head = element("tr");
    for (const name of heads) head.append(element("th", name, { scope: "col" }));
    const body = rows.map((cells) => {
      const row = element("tr");
      for (const cell of cells) {
        if (cell instanceof Node) { row.append(cell); } else { row.append(element("td", cell)); }
      }
      return row;
    });
    const [thead, tbody] = [element("thead"), element("tbody")];
    thead.append(head);
    tbody.append(...body);
    fill(target, [thead, tbody]);
  }
  function bar(part, name) {
    const cell = element("td", null, { class: "bars" });
    const piece = element("span", null, { class: "bar", "aria-hidden": "true" });
    piece.style.width = `${100 * part}%`;
    piece.style.background = `var(${name})`;
    cell.append(piece);
    return cell;
  }
  function swatched(text, name) {
    const cell = element("td");
    const piece = element("span", null, { class: "swatch", "aria-hidden": "true" });
    piece.style.background = `var(${name})`;
    cell.append(piece, text);
    return cell;
  }

  // --- charts ------------------------------------------------------------------------------------------------------------

  function axisOfTime(total) {
    const [name, size] = total < 7200 ? ["min", 60] : total < 259200 ? ["h", 3600] : ["d", 86400];
    return { size, title: `${{ min: "minutes", h: "hours", d: "days" }[name]} of the run` };
  }
  const LADDER = [1e-3, 1e-2, 0.1, 1, 10, 60, 600, 3600, 36000, 86400, 864000, 31557600, 315576000, 3155760000];
  const RUNGS = ["1 ms", "10 ms", "100 ms", "1 s", "10 s", "1 min", "10 min", "1 h", "10 h", "1 d", "10 d", "1 year", "10 years", "100 years"];
  const FINE = [1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 18000, 36000, 86400, 172800, 432000, 864000];
  function durations(values) {
    const seen = values.filter((value) => value > 0);
    if (seen.length && Math.max(...seen) < 200 * Math.min(...seen)) return { type: "log", tickvals: FINE, ticktext: FINE.map((rung) => seconds(rung).replace("120 s", "2 min").replace("120 min", "2 h").replace(/^60 s$/, "1 min").replace(/^60 min$/, "1 h")) };
    const wide = seen.length && Math.max(...seen) > 1e6 * Math.min(...seen);
    const kept = LADDER.map((_, i) => i).filter((i) => !wide || !["10 ms", "100 ms", "10 s", "10 min", "10 h", "10 d", "10 years"].includes(RUNGS[i]));
    return { type: "log", tickvals: kept.map((i) => LADDER[i]), ticktext: kept.map((i) => RUNGS[i]) };
  }
  const narrow = () => window.innerWidth < 600;
  function draw(id, label, traces, layout) {
    const target = $(id);
    target.setAttribute("aria-label", label);
    if (!window.Plotly) { target.hidden = true; return; }
    target.hidden = !traces.length;
    if (target.hidden) return;
    const titled = (given) => (given && given.title ? { ...given, title: { ...given.title, font: { size: 12, color: color("--soft") }, standoff: 6 } } : given);
    const axis = { gridcolor: color("--grid"), linecolor: color("--line"), zerolinecolor: color("--line"), automargin: true, fixedrange: true };
    Plotly.react(target, traces, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, -apple-system, Segoe UI, Roboto, DejaVu Sans, sans-serif", color: color("--ink"), size: 13 },
      margin: { l: 8, r: 12, t: 10, b: 8 }, dragmode: false, hovermode: "closest",
      legend: { orientation: "h", x: 0, xanchor: "left", y: 1.02, yanchor: "bottom", traceorder: "normal", font: { size: narrow() ? 11 : 13 } },
      hoverlabel: { bgcolor: color("--card"), bordercolor: color("--line"), font: { color: color("--ink") } },
      ...layout, xaxis: { ...axis, ...titled(layout.xaxis) }, yaxis: { ...axis, ...titled(layout.yaxis) },
    }, { displayModeBar: false, responsive: true, scrollZoom: false });
  }

  function timeline(doc) {
    const line = doc.timeline;
    const axis = axisOfTime(doc.wall_s);
    const end = (line.start_s.length * line.slice_s) / axis.size;
    const middle = line.start_s.map((start) => (start + line.slice_s / 2) / axis.size);
    const phases = line.seconds_by_phase;
    const totals = line.start_s.map((_, i) => Object.values(phases).reduce((sum, column) => sum + column[i], 0));
    const traces = [];
    for (const [name, members, tint] of GROUPS) {
      const columns = members.map((phase) => phases[phase]).filter(Boolean);
      const spent = totals.map((_, i) => columns.reduce((sum, column) => sum + column[i], 0));
      if (!spent.some((value) => value > 0)) continue;
      traces.push({
        type: "bar", name, x: middle, y: spent.map((value, i) => (totals[i] > 0 ? (100 * value) / totals[i] : null)),
        width: line.slice_s / axis.size, marker: { color: color(tint), line: { width: 0 } },
        customdata: spent.map(seconds), hovertemplate: `${name}: %{y:.1f} % (%{customdata})<extra></extra>`,
      });
    }
    const hit = line.start_s.map((_, i) => i).filter((i) => line.failures[i] + line.planned[i] > 0);
    if (hit.length) {
      const most = Math.max(...hit.map((i) => line.failures[i] + line.planned[i]));
      traces.push({
        type: "scatter", mode: "markers", name: "interruptions", x: hit.map((i) => middle[i]), y: hit.map(() => 104),
        marker: { symbol: "diamond", size: hit.length > 60 ? 6 : 9, opacity: hit.map((i) => (0.2 + (0.8 * (line.failures[i] + line.planned[i])) / most)), color: color("--ink") },
        text: hit.map((i) => `${line.failures[i]} failures, ${line.planned[i]} planned`), hovertemplate: "%{text}<extra></extra>",
      });
    }
    const told = `Goodput ${share(doc.goodput)} of ${seconds(doc.wall_s)}; ` + GROUPS.map(([name, members]) =>
      `${name} ${seconds(members.reduce((sum, phase) => sum + doc.seconds_by_phase[phase], 0))}`).join(", ");
    draw("timeline", told, doc.wall_s > 0 ? traces : [], {
      barmode: "stack", bargap: 0, xaxis: { title: { text: axis.title }, showgrid: false, range: [0, end] },
      yaxis: { range: [0, 109], ticksuffix: " %", tickvals: [0, 25, 50, 75, 100] },
    });
    const fewer = doc.degraded > 1e-4;
    draw("devices", "Devices at work and wanted along the run", fewer ? [
      { type: "scatter", mode: "lines", name: "devices wanted", x: middle, y: line.devices_wanted, line: { color: color("--soft"), dash: "dot", shape: "hvh" }, hovertemplate: "%{y:.4g} wanted<extra></extra>" },
      { type: "scatter", mode: "lines", name: "at work (mean)", x: middle, y: line.devices, line: { color: color("--productive"), shape: "hvh" }, hovertemplate: "%{y:.4g} at work<extra></extra>" },
    ] : [], { xaxis: { title: { text: axis.title }, range: [0, end] }, yaxis: { rangemode: "tozero", title: { text: "devices" } } });
  }

  function phases(doc) {
    const tints = Object.fromEntries(GROUPS.flatMap(([, members, tint]) => members.map((phase) => [phase, tint])));
    const rows = Object.entries(doc.seconds_by_phase).filter(([, spent]) => spent > 0).sort((a, b) => b[1] - a[1]);
    const deviceTotal = Object.values(doc.device_seconds_by_phase).reduce((sum, value) => sum + value, 0);
    const part = (phase) => (deviceTotal > 0 ? share(doc.device_seconds_by_phase[phase] / deviceTotal) : "-");
    const cells = rows.map(([phase, spent]) => [
      swatched(words(phase), tints[phase]), share(spent / doc.wall_s), seconds(spent), part(phase), bar(spent / doc.wall_s, tints[phase]),
    ]);
    if (doc.degraded > 0) cells.push([swatched("degraded: devices missing", "--line"), "-", "-", part("degraded"), bar(doc.degraded, "--line")]);
    table("phases", ["phase", "share", "time", "of device time", ""], cells, "The run has not begun.");
  }

  function waste(doc) {
    const { expected_then: then, expected_now: now, happened, outside } = doc.waste;
    const bars = [["happened", happened], ["expected now", now], ["expected along the way", then]].filter(([, terms]) => terms);
    const traces = TERMS.map(([term, tint]) => ({
      type: "bar", orientation: "h", name: term, y: bars.map(([name]) => name), x: bars.map(([, terms]) => 100 * terms[term]),
      marker: { color: color(tint) }, hovertemplate: `${term}: %{x:.3g} %<extra>%{y}</extra>`,
    }));
    if (happened && outside > 0) {
      traces.push({ type: "bar", orientation: "h", name: "outside of the model", y: ["happened"], x: [100 * outside],
        marker: { color: color("--ending") }, hovertemplate: "outside of the model: %{x:.3g} %<extra></extra>" });
    }
    const told = bars.map(([name, terms]) => `${name}: ${TERMS.map(([term]) => `${term} ${share(terms[term])}`).join(", ")}`).join("; ");
    draw("waste", told || "Nothing is known yet", bars.length ? traces : [], {
      barmode: "stack", bargap: 0.35, xaxis: { ticksuffix: " %", rangemode: "tozero" }, yaxis: { showgrid: false },
    });
    const audit = doc.status.audit;
    $("audit").textContent = audit ? `Audit: ${seconds(audit.saving_s)} of saving, ${seconds(audit.rework_s)} of rework: ${audit.advice}.` : "";
  }

  function curve(doc) {
    const told = doc.curve;
    $("reason").textContent = doc.status.interval.reason ? `In use: ${doc.status.interval.reason}` : "";
    if (!told) { draw("curve", "No save has been measured yet", [], {}); return; }
    const line = (name, values, tint, dash) => ({
      type: "scatter", mode: "lines", name, x: told.interval_s, y: values.map((value) => 100 * value),
      line: { color: color(tint), dash, width: dash ? 1.5 : 2.5 }, text: told.interval_s.map(seconds), hovertemplate: `${name} at %{text}: %{y:.3g} %<extra></extra>`,
    });
    const least = Math.min(...told.waste.total);
    const nearest = told.interval_s.reduce((best, at, i) => (Math.abs(Math.log(at / told.used_s)) < Math.abs(Math.log(told.interval_s[best] / told.used_s)) ? i : best), 0);
    const used = told.used_s ? told.waste.total[nearest] : 0;
    const top = Math.max(3 * least, Math.min(1.15 * used, 40 * least), 1e-6);
    const marks = [...Object.entries(told.optimum_s).map(([name, at]) => [name, at, "--soft", "dot"])];
    if (told.used_s) marks.push(["in use", told.used_s, "--ink", "solid"]);
    const uprights = marks.map(([name, at, tint, dash]) => ({
      type: "scatter", mode: "lines", name: `${name}: ${seconds(at)}`, x: [at, at], y: [0, 100 * top], hoverinfo: "name",
      line: { color: color(tint), dash, width: name === "in use" ? 2.5 : 1.2 },
    }));
    draw("curve", `Least waste ${share(least)}; ${marks.map(([name, at]) => `${name} ${seconds(at)}`).join(", ")}`, [
      line("W(T)", told.waste.total, "--productive"), line("save", told.waste.save, "--checkpoint_stall", "dash"),
      line("rework", told.waste.rework, "--wasted_progress", "dash"), line("restart", told.waste.restart, "--restart", "dash"), ...uprights,
    ], { xaxis: { ...durations(told.interval_s), title: { text: "interval T" } }, yaxis: { range: [0, 100 * top], ticksuffix: " %" } });
  }

  function whatif(doc) {
    const names = { restart: "R", stall: "C", upload: "U", interval: "T" };
    const asked = (row) => row.name || Object.entries(row.asked).map(([key, value]) => `${names[key]} = ${seconds(value)}`).join(", ");
    table("whatif", ["", "interval", "goodput", "save", "rework", "restart"], doc.what_if.map((row) => [
      asked(row), seconds(row.interval_s), share(row.goodput), ...TERMS.map(([term]) => share(row.waste && row.waste[term])),
    ]), "No save has been measured yet.");
  }

  function restarts(doc) {
    const rows = doc.restarts.newest;
    const label = (row, i) => `${i + 1}`;
    const traces = rows.length ? PARTS.map((part, i) => ({
      type: "bar", name: words(part), x: rows.map(label), y: rows.map((row) => row.parts[part]), marker: { color: color(`--p${i + 1}`) },
      customdata: rows.map((row) => `${seconds(row.parts[part])}, attempt ${row.attempt}, ${row.kind}, ${row.warm ? "warm" : "cold"}`),
      hovertemplate: `${words(part)}: %{customdata}<extra></extra>`,
    })) : [];
    draw("restarts", `${rows.length} newest restarts, by part`, traces, {
      barmode: "stack", xaxis: { type: "category", showticklabels: false, showgrid: false, title: { text: "oldest to newest" } }, yaxis: { ticksuffix: " s", rangemode: "tozero" },
    });
    table("restartgroups", ["kind", "start", "number", "median", "worst", ...PARTS.map(words)], doc.restarts.groups.map((group) => [
      group.kind, group.warm ? "warm" : "cold", number(group.count), seconds(group.median_s), seconds(group.worst_s), ...PARTS.map((part) => seconds(group.parts[part])),
    ]), "There was no restart.");
  }

  function checkpoints(doc) {
    table("tiers", ["tier", "committed", "failed", "rejected", "deleted", "newest", "size", "C", "U"], Object.entries(doc.checkpoints).map(([name, tier]) => [
      name, number(tier.committed + tier.copied), number(tier.failed + tier.copy_failed), number(tier.rejected), number(tier.deleted),
      tier.newest ? `step ${tier.newest.step}` : "-", tier.newest ? bytes(tier.newest.bytes) : "-", seconds(tier.stall_s), seconds(tier.upload_s),
    ]), "No checkpoint has been committed.");
    const axis = axisOfTime(doc.wall_s);
    const line = doc.timeline;
    const traces = [];
    Object.entries(line.saves).forEach(([tier, columns], i) => {
      const at = columns.count.map((_, k) => k).filter((k) => columns.count[k]);
      const trace = (name, values, tint, mode, symbol) => ({
        type: "scatter", mode, name: `${name}, ${tier}`, x: at.map((k) => (line.start_s[k] + line.slice_s / 2) / axis.size), y: at.map((k) => values[k] || null),
        line: { color: color(tint), width: 2 }, marker: { color: color(tint), symbol, size: 5 }, text: at.map((k) => `${seconds(values[k])}, ${columns.count[k]} saves`), hovertemplate: `${name}: %{text}<extra>${tier}</extra>`,
      });
      traces.push(trace("C", columns.stall_mean_s, `--p${(2 * i) % 7 + 1}`, "lines+markers", "circle"));
      traces.push(trace("U", columns.upload_mean_s, `--p${(2 * i + 2) % 7 + 1}`, "lines+markers", "square"));
    });
    draw("saves", "Stall C and time to commit U of saves along the run, means", traces, {
      xaxis: { title: { text: axis.title }, range: [0, doc.wall_s / axis.size] }, yaxis: durations(traces.flatMap((trace) => trace.y)),
    });
    const status = doc.status;
    const { newest, passed, failed } = doc.drills;
    const lines = [
      ...(status.tiers || []).filter((tier) => tier.failing).map((tier) => [`tier ${tier.name} is failing: ${tier.error}`, "error"]),
      ...Object.entries(doc.checkpoints).filter(([, tier]) => tier.error).map(([name, tier]) => [`the last save that failed on ${name}: ${tier.error}`, "warning"]),
      ...(newest ? [[`restore drills: ${passed} passed, ${failed} failed; the newest ${newest.ok ? "passed" : `FAILED: ${newest.problem}`} (step ${newest.step ?? "-"}, ${when(newest.at)})`, newest.ok ? "info" : "error"]] : []),
      ...(status.pins || []).slice(0, 20).map((pin) => [`pinned: step ${number(pin.step)}${pin.label ? ` (${pin.label})` : ""}`, "info"]),
      ...doc.rollbacks.map((row) => [`${when(row.at)} rolled back to step ${number(row.to_step)} by ${row.source}: ${row.why}`, "warning"]),
    ];
    fill($("kept"), lines.map(([text, level]) => element("li", plain(text), { class: level })));
  }

  function measured(doc) {
    const rows = doc.decisions;
    if (!rows.length) { draw("measured", "Nothing is measured yet", [], {}); return; }
    const axis = axisOfTime(doc.wall_s);
    const { mtbf_s, mtbf_low_s, mtbf_high_s, stall_s, restart_s } = doc.status.estimates;
    const end = { ...rows[rows.length - 1], x: doc.wall_s, mtbf_s, mtbf_low_s, mtbf_high_s, stall_s, restart_s };
    const points = [...rows, end];
    const x = points.map((row) => row.x / axis.size);
    const line = (name, key, tint, extra) => ({
      type: "scatter", mode: "lines", name, x, y: points.map((row) => row[key]), line: { color: color(tint), shape: "hv", width: 2 },
      text: points.map((row) => seconds(row[key])), hovertemplate: `${name}: %{text}<extra></extra>`, ...extra,
    });
    const edge = { line: { width: 0, shape: "hv" }, hoverinfo: "skip", showlegend: false };
    draw("measured", `M ${seconds(end.mtbf_s)}, interval ${seconds(end.interval_s)}, R ${seconds(end.restart_s)}, C ${seconds(end.stall_s)}`, [
      line("high", "mtbf_high_s", "--wait", edge), line("M, 90 %", "mtbf_low_s", "--wait", { ...edge, fill: "tonexty", fillcolor: faint("--wait"), showlegend: true }),
      line("M", "mtbf_s", "--wait"), line("interval T", "interval_s", "--productive"), line("R", "restart_s", "--restart"), line("C", "stall_s", "--checkpoint_stall"),
    ], { xaxis: { title: { text: axis.title }, range: [0, doc.wall_s / axis.size] }, yaxis: durations(points.flatMap((row) => [row.mtbf_low_s, row.mtbf_high_s, row.interval_s, row.restart_s, row.stall_s])) });
  }

  function interruptions(doc) {
    table("causes", ["cause", "number", "steps lost", "time lost"], doc.causes.map((row) => [
      row.planned ? `${words(row.cause)} (planned)` : words(row.cause), number(row.count), number(row.lost_steps), seconds(row.lost_s),
    ]), "There was no interruption.");
    const list = $("interruptions");
    const open = new Set([...list.querySelectorAll("details[open]")].map((item) => item.dataset.key));
    fill(list, doc.interruptions.map((row) => {
      const where = [row.node === null ? "" : `node ${row.node}`, row.rank === null ? "" : `rank ${row.rank}`].filter(Boolean).join(", ");
      const lost = row.lost_steps ? `, ${number(row.lost_steps)} steps lost (${seconds(row.lost_s)})` : "";
      const head = element("summary");
      head.append(element("span", `${when(row.at)}, attempt ${row.attempt}${where ? `, ${where}` : ""}`, { class: "when" }), element("br"),
        `${plain(row.detail)} [${row.planned ? "planned" : `${row.cause}, ${row.severity}`}]${lost}`);
      const item = element("details");
      item.dataset.key = `${row.attempt}/${row.at}`;
      item.open = open.has(item.dataset.key);
      item.append(head, element("pre", plain(row.message) || "No last words are known."));
      if (row.log) item.append(element("pre", `${row.log.path}:\n${plain(row.log.text)}`));
      return item;
    }));
  }

  function now(doc) {
    const status = doc.status;
    const over = status.outcome;
    document.title = `${status.name || "ckptd"}: ${over ? over.outcome : status.state}`;
    $("name").textContent = status.name || "ckptd";
    const state = element("b", words(over ? over.outcome : status.state));
    const more = over ? `: ${over.detail}` : ` attempt ${status.attempt}, ${status.world_size} workers, ${status.devices_healthy} of ${status.devices_known} devices healthy`;
    fill($("state"), [state, more]);
    const e = status.estimates;
    const committed = status.last_committed;
    const tile = (name, value, small) => {
      const box = element("div");
      const text = element("dd", value);
      if (small) text.append(element("small", small));
      box.append(element("dt", name), text);
      return box;
    };
    const asOf = doc.asked_at || doc.newest_event_at || 0;
    fill($("tiles"), [
      tile("goodput", share(doc.goodput), `of ${seconds(doc.wall_s)}`),
      tile("ETTR", share(doc.ettr), "of the device time wanted"),
      tile("step", number(status.step), status.loss === null ? null : `loss ${status.loss.toFixed(4)}`),
      tile("committed", committed ? `step ${number(committed.step)}` : "nothing yet", committed ? `${seconds(Math.max(0, asOf - committed.at))} ago, ${committed.tier}` : null),
      tile("interval", seconds(status.interval.seconds), status.interval.steps ? `${number(status.interval.steps)} steps` : null),
      tile("M", seconds(e.mtbf_s), `90 %: ${seconds(e.mtbf_low_s)} to ${seconds(e.mtbf_high_s)}`),
      tile("R", seconds(e.restart_s), "failure to first step"),
      tile("C", seconds(e.stall_s), `stall of a save; U ${seconds(e.upload_s)}`),
      tile("failures", number(status.failures), `${number(status.restarts)} restarts`),
      tile("saves", number(status.saves.committed), `${status.saves.failed} failed, ${status.saves.rejected} rejected`),
    ]);
    fill($("notes"), [
      ...(status.devices_left_out || []).slice(0, 20).map((d) => element("li", `left out: device ${d.index} of node ${d.node}: ${d.why}`, { class: "warning" })),
      ...(status.notes || []).map((note) => element("li", `${when(note.at)} ${note.level}: ${note.what}`, { class: note.level })),
    ]);
  }

  // --- showing it --------------------------------------------------------------------------------------------------------

  let shown = null;
  function show(doc) {
    shown = doc;
    for (const part of [now, timeline, phases, waste, curve, whatif, restarts, checkpoints, measured, interruptions]) part(doc);
    document.body.dataset.shown = String(Number(document.body.dataset.shown || 0) + 1);
  }
  function warn(text) {
    $("note").hidden = !text;
    $("note").textContent = text || "";
  }
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (shown) show(shown); });

  const source = document.body.dataset.source;
  if (!source) {
    show(JSON.parse($("document").textContent));
    if (!window.Plotly) warn("The charts could not be drawn.");
    return;
  }
  let since = null;
  async function poll() {
    if (!document.hidden || !shown) {
      try {
        const answer = await fetch(source, { cache: "no-store", signal: AbortSignal.timeout(30000) });
        const doc = await answer.json();
        if (doc.error) throw new Error(doc.error);
        if (!answer.ok) throw new Error(`status ${answer.status}`);
        show(doc);
        since = null;
        warn(window.Plotly ? "" : "The charts could not be loaded.");
      } catch (error) {
        since = since || new Date();
        warn(`No news from the daemon since ${since.toLocaleTimeString()} (${error.message}): what is shown is what it said last.`);
      }
    }
    setTimeout(poll, POLL_MS);
  }
  poll();
})();
