// Draws what workers did. Without this file the table below the charts has the same figures.
"use strict";
(() => {
  const place = document.getElementById("charts");
  if (!place || !window.uPlot) return;
  const span = seconds => {
    if (seconds == null) return "–";
    if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
    if (seconds < 120) return `${Number(seconds.toPrecision(3))} s`;
    return seconds < 7200 ? `${Math.round(seconds / 60)} m` : `${Math.round(seconds / 3600)} h`;
  };
  const rate = each => each == null ? "–" : `${Number(each.toPrecision(3))}/s`;
  const count = each => each == null ? "–" : `${Math.round(each)}`;
  const CHARTS = [
    { title: "Runs that ended", show: rate,
      lines: [["ended", "all", "--link"], ["failed", "failed", "--bad"],
        ["retried", "retried", "--warn"]] },
    { title: "Wait before the first run", show: span,
      lines: [["wait_median", "median", "--link"], ["wait_95", "95 %", "--warn"]] },
    { title: "Duration of runs", show: span,
      lines: [["run_median", "median", "--link"], ["run_95", "95 %", "--warn"]] },
    { title: "Waiting messages", show: count, lines: [["waiting", "waiting", "--link"]] },
    { title: "Leases lost", show: rate, lines: [["lost", "lost", "--bad"]] },
  ];
  const HEIGHT = 150;
  const LEAST_PAUSE = 9000;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let drawn = [];
  let data = null;
  let readAt = 0;
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const width = figure => Math.max(200, figure.clientWidth - 18);

  // Deploys, pauses and outages as lines; the list below the charts says which is which.
  const drawMarks = u => {
    const { ctx, bbox } = u;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
    for (const mark of data.marks) {
      const x = Math.round(u.valToPos(mark.at, "x", true));
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.strokeStyle = colour(mark.kind === "silent" ? "--bad" : "--soft");
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  };

  const columns = chart => [data.times, ...chart.lines.map(([name]) => data[name])];

  const make = chart => {
    const figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    caption.textContent = chart.title;
    const box = document.createElement("div");
    box.setAttribute("role", "img");
    box.setAttribute("aria-label", `${chart.title}: a chart; the table below has its figures`);
    figure.append(caption, box);
    place.append(figure);
    const axis = { stroke: () => colour("--soft"), grid: { stroke: () => colour("--line"), width: 1 },
      ticks: { stroke: () => colour("--line"), width: 1 } };
    const options = {
      width: width(figure), height: HEIGHT,
      cursor: { drag: { setScale: false }, sync: { key: "history" } },
      scales: { y: { range: (u, least, most) => [0, most > 0 ? most * 1.1 : 1] } },
      axes: [axis, { ...axis, size: 62, values: (u, all) => all.map(chart.show) }],
      series: [
        { value: (u, at) => at == null ? "–" : new Date(at * 1000).toLocaleString() },
        ...chart.lines.map(([, label, name]) => ({
          label, stroke: () => colour(name), width: 1.5, spanGaps: false,
          points: { show: (u, index) => alone(u.data[index]), size: 4, fill: () => colour(name) },
          value: (u, each) => chart.show(each),
        })),
      ],
      hooks: { draw: [drawMarks] },
    };
    return { chart, figure, plot: new uPlot(options, columns(chart), box) };
  };

  // A point between two gaps has no line to be seen by.
  const alone = values => values.some((each, index) =>
    each != null && values[index - 1] == null && values[index + 1] == null);

  const read = async () => {
    if (Date.now() - readAt < LEAST_PAUSE) return;
    readAt = Date.now();
    const answer = await fetch(place.dataset.from, { headers: { accept: "application/json" } });
    if (!answer.ok) { readAt = 0; return; }  // it is still being counted, perhaps
    data = await answer.json();
    place.hidden = false;
    if (drawn.length) for (const each of drawn) each.plot.setData(columns(each.chart));
    else { drawn = CHARTS.map(make); fit(); }
  };

  const fit = () => {
    for (const each of drawn) each.plot.setSize({ width: width(each.figure), height: HEIGHT });
  };
  addEventListener("resize", fit);
  dark.addEventListener("change", () => { for (const each of drawn) each.plot.redraw(); });
  document.body.addEventListener("figures", () => { read().catch(() => {}); });
  read().catch(() => {});
})();
