"use strict";

// Text from the server is of anybody's making, so it enters the page by
// textContent alone. Times are in milliseconds.

const $ = (id) => document.getElementById(id);

const set = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};

const copy = (template) => $(template).content.firstElementChild.cloneNode(true);

const announce = (text) => set($("announcement"), text);

function duration(ms) {
  if (ms < 1000) return `${ms} ms`;
  if (ms < 10_000 && ms % 1000) return `${(Math.floor(ms / 100) / 10).toFixed(1)} s`;
  const s = Math.floor(ms / 1000);
  if (s < 60) return `${s} s`;
  if (s < 3600) return s % 60 ? `${Math.floor(s / 60)} min ${s % 60} s` : `${s / 60} min`;
  if (s < 86_400) return s % 3600 < 60 ? `${Math.floor(s / 3600)} h` : `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86_400)} d ${Math.floor((s % 86_400) / 3600)} h`;
}

// What was sent last.
let hello = { release: false, window: 600_000, ranges: [600_000] };
let view = null;
let points = [];
let minutes = []; // the same, with the most of each minute
let range = 0; // how far to look back: which of hello.ranges

const span = () => hello.ranges[range];
const plotted = () => (range === 0 ? points : minutes);

// --- The stream ---

let source = null;
let again = 0;
let paused = false;

const states = { lost: "Disconnected, trying again", paused: "Paused", waiting: "Connecting" };
let state = "waiting"; // of the stream: live, or one of those
let failing = false; // the server did not answer the last time
let silent = ""; // since when; "" if it never has
let seen = null; // when the view was made, and when the next one is: by performance.now
let age = 0; // of the view that comes next

// A view that is older than this is not called live. One that is older than stale, or so much later than the next
// look was due, is dimmed.
const fresh = 3000;
const stale = { age: 60_000, late: 5000 };

function show(now) {
  state = now;
  renderState();
}

// renderState says how old what is shown is.
function renderState() {
  const now = performance.now();
  const age = view ? now - seen.at : 0;
  const ago = age > fresh ? `${duration(Math.floor(age / 1000) * 1000)} ago` : "";
  let [light, text, time] = [state, states[state], view ? clock(view.time) : ""];
  if (state === "live" && failing) {
    [light, text, time] = ["lost", silent ? `No answer since ${silent}` : "No answer", ago];
  } else if (state === "live" && age <= fresh) {
    text = "Live";
  } else if (state === "live") {
    const pause = seen.next - now;
    [light, text, time] = ["old", `As of ${time}`, `${ago}, ${pause > 0 ? `next look in ${Math.ceil(pause / 1000)} s` : "looking now"}`];
  } else if (ago) {
    time += `, ${ago}`;
  }
  $("light").className = `light ${light}`;
  set($("state"), text);
  set($("clock"), time);
  document.body.classList.toggle("stale", light === "lost" || (view !== null && (age > stale.age || (state === "live" && now - seen.next > stale.late))));
}

setInterval(renderState, 500);

function close() {
  clearTimeout(again);
  source?.close();
  source = null;
}

function open() {
  close();
  if (paused || document.hidden) return;
  source = new EventSource("page.events");
  source.addEventListener("hello", (e) => {
    hello = JSON.parse(e.data);
    points = hello.history;
    minutes = hello.minutes;
    age = hello.age;
    renderRanges();
  });
  source.addEventListener("view", (e) => {
    const before = view;
    view = JSON.parse(e.data);
    if (points.at(-1)?.t !== view.point.t) points.push(view.point);
    points = points.filter((p) => p.t > view.point.t - hello.window);
    if (minutes.at(-1)?.t === view.minute.t) minutes.pop();
    minutes.push(view.minute);
    minutes = minutes.filter((p) => p.t > view.point.t - hello.ranges.at(-1));
    const now = performance.now();
    seen = { at: now - age, next: now + (age ? hello.next : view.next) };
    age = 0;
    failing = false;
    show("live");
    $("trouble").hidden = true;
    render();
    if (before) tell(before, view);
  });
  source.addEventListener("failed", (e) => {
    const failure = JSON.parse(e.data);
    failing = true;
    silent = failure.since ? clock(failure.since) : "";
    show("live");
    const below = view ? ` What is below is of ${clock(view.time)}.` : "";
    set($("trouble"), `The database server did not tell: ${failure.error}.${below}`);
    $("trouble").hidden = false;
  });
  source.onerror = () => {
    close();
    show("lost");
    again = setTimeout(open, 3000);
  };
}

// tell has screen readers say what is worth an interruption.
function tell(before, now) {
  if (now.losses.total > before.losses.total) announce(`A lock was lost: ${now.losses.recent[0].key}`);
  else if (now.deadlocks !== null && before.deadlocks !== null && now.deadlocks > before.deadlocks) announce("The server has broken a deadlock.");
}

$("pause").addEventListener("click", () => {
  paused = !paused;
  set($("pause"), paused ? "Resume" : "Pause");
  if (paused) {
    close();
    show("paused");
  } else {
    show("waiting");
    open();
  }
});

document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));

// --- Figures ---

const clock = (time) => `${time.slice(11, 19)} UTC`;

function render() {
  for (const node of document.querySelectorAll(".window")) set(node, watched());
  set($("namespace"), view.namespace);
  document.title = view.namespace ? `Locks: ${view.namespace}` : "Locks";
  set($("held"), count(view.held, view.heldMore));
  set($("held-note"), unseen());
  set($("waiting"), count(view.waiting, view.waitingMore));
  set($("waiting-note"), more(view.waiting, view.waitingMore) || "one a key and process: more may queue in the processes");
  set($("longest"), view.longest ? atLeast(view.longest) : "–");
  const deadlocks = points.reduce((n, p) => n + (p.d ?? 0), 0);
  const told = view.deadlocks !== null;
  const circles = view.circles ? `${view.circles} ${view.circles === 1 ? "circle" : "circles"} of waits now, which the server does not break; ` : "";
  figure("deadlocks", told || circles ? (told ? deadlocks : 0) + view.circles : null, circles + (told ? `${view.deadlocks} since the server started` : "not told by the server"));
  const lost = view.losses.recent.filter(recent).length;
  const older = lost > 0 && lost === view.losses.recent.length && view.losses.total > lost; // which are not remembered
  if (view.losses.total === null) figure("losses", null, "not known: the account cannot read the leases");
  else figure("losses", lost, hello.seen ? "leases that ran out while held, or were taken away, as far as this page saw" : `${view.losses.total} in this process since ${minute(view.losses.since)}`, older ? "+" : "");
  renderPlots();
  renderLocks();
  renderHot();
  renderLosses();
  renderGaps();
}

const minute = (ms) => `${new Date(ms).toISOString().slice(11, 16)} UTC`;

// recent losses are those that the figure counts.
const recent = (loss) => loss.ago < hello.window;

// watched is the time that the figures are of: less than the window if somebody looked for less.
function watched() {
  const ms = points.reduce((sum, p, i) => sum + (i > 0 && p.t - points[i - 1].t <= unwatched ? p.t - points[i - 1].t : 0), 0);
  if (ms === 0) return "the first look";
  return ms < 0.95 * hello.window ? `the ${duration(Math.floor(ms / 1000) * 1000)} watched` : duration(hello.window);
}

// count is a number as far as it is known, and more what to say of that.
const count = (n, incomplete) => (n === null ? "–" : incomplete ? `≥ ${n}` : String(n));

function more(n, incomplete) {
  if (!incomplete) return "";
  return n === null ? "none seen; there may be some" : `${n} seen; there may be more`;
}

// atLeast is a time that may be longer than the server tells; "" if it tells nothing.
const atLeast = (ms) => (ms ? `≥ ${duration(ms)}` : "");

// unseen says that there may be more locks than are counted, or how many have those.
function unseen() {
  if (!view.heldMore) return view.held > 1 ? `by ${view.holders} ${view.holders === 1 ? "holder" : "holders"}` : "";
  if (view.unseen > 0) return `${view.held ?? "none"} seen; ${view.unseen} ${view.unseen === 1 ? "transaction" : "transactions"} may hold row locks that the server does not show`;
  return more(view.held, true);
}

function figure(name, n, note, more = "") {
  set($(name), n === null ? "–" : `${n}${more}`);
  $(name).classList.toggle("bad", n > 0);
  set($(`${name}-note`), note);
}

// --- Plots ---

const svgNode = (name, attributes) => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const key in attributes) node.setAttribute(key, attributes[key]);
  return node;
};

// A plot's drawing is as many units wide and high; CSS stretches it.
const width = 600;
const height = 100;

const plots = [
  {
    name: "longest", of: (p) => p.w, text: duration, read: (ms) => atLeast(ms) || "0", marks: true,
    rungs: [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14_400, 43_200, 86_400].map((s) => s * 1000),
  },
  {
    name: "waiting", of: (p) => p.n, text: String, read: (n) => count(n, plotted().some((p) => p.m)), marks: false,
    rungs: [4, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000],
  },
];

for (const plot of plots) {
  const box = $(`${plot.name}-plot`);
  plot.box = box;
  plot.svg = svgNode("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  for (const y of [0, height / 2, height]) plot.svg.append(svgNode("line", { class: "rule", x1: 0, x2: width, y1: y, y2: y }));
  for (const part of ["area", "line", "deadlock", "loss", "cursor"]) {
    plot[part] = svgNode("path", { class: part });
    plot.svg.append(plot[part]);
  }
  plot.labels = document.createElement("div");
  plot.labels.className = "rungs";
  plot.labels.append(...[0, 1, 2].map(() => document.createElement("span")));
  plot.times = document.createElement("div");
  plot.times.className = "times";
  plot.times.append(...[0, 1, 2].map(() => document.createElement("span")));
  box.append(plot.svg, plot.labels, plot.times);
  box.setAttribute("aria-valuemax", "0");
  box.addEventListener("pointermove", (e) => {
    const r = plot.svg.getBoundingClientRect();
    point((1 - (e.clientX - r.left) / r.width) * span());
  });
  box.addEventListener("pointerleave", () => point(null));
  box.addEventListener("blur", () => point(null));
  box.addEventListener("keydown", (e) => {
    const small = span() / 120;
    const step = { ArrowLeft: small, ArrowRight: -small, ArrowDown: small, ArrowUp: -small, PageDown: 12 * small, PageUp: -12 * small, Home: span(), End: -span() }[e.key];
    if (e.key === "Escape") point(null);
    if (step === undefined) return;
    e.preventDefault();
    point((ago ?? 0) + step);
  });
}

// ago is where in the plots somebody points at; null is nowhere.
let ago = null;

function point(at) {
  ago = at === null ? null : Math.min(Math.max(at, 0), span());
  renderPlots();
}

function renderPlots() {
  if (!view) return;
  const list = plotted();
  const now = points.at(-1).t;
  const x = (p) => width * (1 - (now - p.t) / span());
  const pointed = ago === null ? list.at(-1) : list.findLast((p) => p.t <= now - ago && p.t > now - ago - broken());
  const losses = view.losses.recent.filter((l) => l.ago < span()).map((l) => ({ t: now - l.ago }));
  const seen = now - list[0].t;
  const shortly = seen < 0.9 * span() ? `; only the last ${duration(Math.max(1, Math.round(seen / 1000)) * 1000)} were watched` : "";
  $("legend").hidden = losses.length === 0 && !list.some((p) => p.d);
  for (const plot of plots) {
    const known = list.filter((p) => plot.of(p) !== null);
    const most = known.reduce((n, p) => Math.max(n, plot.of(p)), 0);
    const top = plot.rungs.find((r) => r >= most) ?? most;
    const y = (p) => height * (1 - plot.of(p) / top);
    const runs = unbroken(list, plot).map((run) => run.map((p) => `${x(p).toFixed(1)} ${y(p).toFixed(1)}`));
    plot.line.setAttribute("d", runs.map((run) => `M${run.join("L")}${run.length > 1 ? "" : "h0"}`).join(""));
    plot.area.setAttribute("d", runs.map((run) => `M${run[0].split(" ")[0]} ${height}L${run.join("L")}V${height}Z`).join(""));
    const upright = (list) => list.map((p) => `M${x(p).toFixed(1)} 0V${height}`).join("");
    plot.deadlock.setAttribute("d", plot.marks ? upright(list.filter((p) => p.d)) : "");
    plot.loss.setAttribute("d", plot.marks ? upright(losses) : "");
    plot.cursor.setAttribute("d", ago === null ? "" : upright([{ t: now - ago }]));
    [top, top / 2, 0].forEach((n, i) => set(plot.labels.children[i], n ? plot.text(n) : "0"));
    [span(), span() / 2, 0].forEach((t, i) => set(plot.times.children[i], t ? `−${duration(t)}` : "now"));
    const text = (n) => (n === null ? "not known" : plot.read(n));
    const reading = `${pointed ? text(plot.of(pointed)) : "nobody looked"}${ago === null ? "" : `, ${duration(Math.round(ago / 1000) * 1000)} ago`}`;
    set($(`${plot.name}-reading`), ago === null ? `peak ${known.length > 0 ? text(most) : "not known"}${shortly}` : reading);
    plot.box.setAttribute("aria-valuemin", String(-span() / 1000));
    plot.box.setAttribute("aria-valuenow", String(-Math.round((ago ?? 0) / 1000)));
    plot.box.setAttribute("aria-valuetext", reading);
  }
}

// Points that are further apart than this have a time between them in which
// nobody looked.
const unwatched = 35_000;
const broken = () => (range === 0 ? unwatched : 150_000);

// unbroken are the runs of points of which a plot knows something.
function unbroken(list, plot) {
  const runs = [];
  list.forEach((p, i) => {
    if (plot.of(p) === null) return;
    if (i === 0 || p.t - list[i - 1].t > broken() || plot.of(list[i - 1]) === null) runs.push([]);
    runs.at(-1).push(p);
  });
  return runs;
}

function renderRanges() {
  const box = $("ranges");
  box.replaceChildren(...hello.ranges.map((ms, i) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = duration(ms);
    button.setAttribute("aria-pressed", String(i === range));
    button.addEventListener("click", () => {
      range = i;
      ago = null;
      [...box.children].forEach((b, n) => b.setAttribute("aria-pressed", String(n === range)));
      if (!view) return;
      renderPlots();
      renderHot();
    });
    return button;
  }));
}

// --- What was waited for most ---

function renderHot() {
  const list = view.hot[range];
  $("hot").hidden = list.length === 0;
  set($("hot-what"), hello.classes ? "Keys" : "Key");
  set($("hot-range"), duration(span()));
  const body = $("hot-list");
  while (body.children.length > list.length) body.lastElementChild.remove();
  list.forEach((h, i) => {
    let row = body.children[i];
    if (!row) {
      row = body.appendChild(copy("hot-template"));
      const key = row.querySelector(".key");
      key.addEventListener("click", () => {
        $("find").value = key.textContent;
        renderLocks();
        $("locks-title").focus();
      });
    }
    const rest = h.class === "all others";
    set(row.querySelector(".key"), h.class);
    row.querySelector(".key").disabled = rest;
    const lost = h.lost || view.losses.total !== null ? String(h.lost) : "–";
    [h.now && !rest ? count(h.now, h.nowMore) : "–", atLeast(h.waited) || "–", atLeast(h.longest) || "–", count(h.most, h.more), lost].forEach((text, n) => set(row.children[n + 1], text));
    row.lastElementChild.classList.toggle("bad", h.lost > 0);
  });
}

// --- Locks ---

const rows = new Map(); // by the lock's id

// How many locks are shown until somebody wants all.
const few = 20;

// A line of more waiters than this is folded.
const unfolded = 5;
let all = false;

$("all").addEventListener("click", () => {
  all = !all;
  renderLocks();
});

const who = (c) => c.program || (c.user && c.host ? `${c.user}@${c.host}` : c.user || c.host) || "somebody";

function where(c) {
  const parts = [];
  if (c.program && c.user) parts.push(c.host ? `${c.user}@${c.host}` : c.user);
  else if (c.program && c.host && !c.program.includes(c.host)) parts.push(c.host);
  if (c.conn) parts.push(`connection ${c.conn}`);
  if (c.pid && !c.program?.includes(`:${c.pid}:`)) parts.push(`process ${c.pid}`);
  if (c.shared) parts.push("shared");
  return parts.join(", ");
}

function matches(lock) {
  if ($("contended").checked && lock.waiting === 0) return false;
  const wanted = $("find").value.trim().toLowerCase();
  return !wanted || [lock.key, lock.class, ...[...lock.holders, ...lock.waiters].map((c) => `${who(c)} ${where(c)}`)].some((s) => s.toLowerCase().includes(wanted));
}

function renderLocks() {
  const list = $("locks");
  const found = view.locks.filter(matches); // the longest wait comes first
  const shown = all ? found : found.slice(0, few);
  $("all").hidden = found.length <= few;
  set($("all"), all ? `Show ${few} only` : `Show ${found.length - shown.length} more`);
  const focused = document.activeElement;
  let next = list.firstElementChild;
  for (const lock of shown) {
    let row = rows.get(lock.id);
    if (!row) rows.set(lock.id, (row = newRow()));
    row.update(lock);
    if (row.node === next) next = next.nextElementSibling;
    else list.insertBefore(row.node, next);
  }
  while (next) {
    const gone = next;
    next = next.nextElementSibling;
    gone.remove();
  }
  const there = new Set(shown.map((l) => l.id));
  for (const id of rows.keys()) if (!there.has(id)) rows.delete(id);
  if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });

  const total = view.locks.length + view.unshown;
  set($("count"), shown.length < total ? `${shown.length} of ${total}` : "");
  $("none").hidden = shown.length > 0;
  set($("none"), total > 0 ? "None of them is like that." : view.heldMore || view.waitingMore ? "No lock is seen. That does not mean that there is none: what is not shown is at the end of the page." : "Nobody has a lock.");
}

const kinds = { row: "row lock", advisory: "advisory lock" };

function newRow() {
  const node = copy("lock-template");
  const part = (selector) => node.querySelector(selector);
  const key = part(".key");
  const tag = part(".tag");
  let lock;
  let first = true;
  let button = null;
  part(".history").addEventListener("toggle", () => part(".history").open && renderHistory(part(".history ul"), lock.id));
  const update = (now) => {
    lock = now;
    set(key, lock.key);
    set(tag, [kinds[lock.strategy] ?? lock.strategy, lock.slot !== undefined ? `slot ${lock.slot}` : "", lock.nameless ? "key not told" : ""].filter(Boolean).join(", "));
    fill(part(".holders"), lock.holders, (li, c) => set(li.querySelector(".time"), ""));
    if (lock.holders.length === 0) set(part(".how"), "holder not told");
    else set(part(".how"), how(lock) + (lock.holdersMore ? "; others may hold it, too" : ""));
    if (hello.release && lock.releasable && !button) {
      button = document.createElement("button");
      button.type = "button";
      button.append("Release", unseenSpan());
      button.addEventListener("click", () => ask(lock));
      part(".act").append(button);
    } else if (!(hello.release && lock.releasable)) {
      button?.remove();
      button = null;
    }
    if (button) set(button.lastElementChild, ` ${lock.key}`);
    const blame = part(".blame");
    blame.hidden = !lock.holdsUp && !lock.circle;
    set(blame, lock.circle ? "in a circle of waits" : `${lock.slot !== undefined ? "with the other slots " : ""}holds up ${lock.holdsUp}`);
    part(".why").hidden = !lock.why;
    set(part(".why"), lock.why ?? "");
    part(".history").hidden = !hello.record;
    const queue = part(".queue");
    if (first) queue.open = lock.waiting <= unfolded;
    first = false;
    queue.hidden = lock.waiting === 0;
    const waited = (c) => (c.for ? duration(c.for) : atLeast(c.least));
    const longest = waited(lock.waiters.reduce((most, c) => ((c.least ?? 0) > (most.least ?? 0) ? c : most), {}));
    const long = longest ? `, ${lock.waiting > 1 ? "the longest " : ""}for ${longest}` : "";
    set(part("summary"), `${count(lock.waiting, lock.waitersMore)} waiting${lock.slot !== undefined ? " for any slot" : ""}${long}`);
    part("ol").classList.toggle("unordered", !lock.inOrder);
    fill(part("ol"), lock.waiters, (li, c) => set(li.querySelector(".time"), waited(c)));
    const others = lock.waiting > lock.waiters.length ? `and ${lock.waiting - lock.waiters.length} more` : "";
    const order = lock.overtaken ? "in the server's order: who has waited for the lockTTL (30 s) asks anew, and is the last then" : "";
    set(part(".more"), [others, order].filter(Boolean).join("; "));
  };
  return { node, update };
}

// renderHistory asks for the last hour of a lock, and shows it in the list.
async function renderHistory(list, id) {
  let lines;
  try {
    const answer = await fetch(`page.history?id=${encodeURIComponent(id)}`);
    lines = answer.ok ? await answer.json() : [{ text: (await answer.text()).trim(), bad: true }];
    if (lines.length === 0) lines = [{ text: "Nothing was recorded." }];
  } catch (failure) {
    lines = [{ text: `No answer: ${failure.message}`, bad: true }];
  }
  list.replaceChildren(...lines.map((line) => {
    const li = copy("happened-template");
    set(li.querySelector(".ago"), line.time ? clock(line.time) : "");
    set(li.querySelector(".why"), line.text);
    li.querySelector(".why").classList.toggle("bad", line.bad === true);
    return li;
  }));
}

function unseenSpan() {
  const node = document.createElement("span");
  node.className = "unseen";
  return node;
}

// before is the server's time so many milliseconds ago; after that in so many.
function before(ms) {
  const then = new Date(Date.parse(view.time) - ms).toISOString();
  return `${Math.abs(ms) < 43_200_000 ? "" : `${then.slice(0, 10)} `}${clock(then)}`;
}

const after = (ms) => before(-ms);

function how(lock) {
  const first = lock.holders[0];
  if (first.left) return `given back, kept until ${after(lock.remaining ?? 0)}`;
  const least = first.least ? `held for ${duration(first.least)} at least` : "";
  if (lock.strategy === "lease") {
    const held = first.for ? `held for ${duration(first.for)}` : least;
    let state = `${duration(lock.remaining ?? 0)} left`;
    if (first.silent) state = `not renewed for ${duration(first.silent)} (TTL ${duration(first.ttl)})`;
    else if (first.overdue) state += `, not renewed yet, about ${duration(first.overdue)} of ${duration(first.ttl)}`;
    return `${state}, token ${lock.token}${held && `, ${held}`}`;
  }
  if (first.for) return `held for ${duration(first.for)}`;
  if (!first.within) return least || "since when is not known";
  return `${least && `${least}, `}in a transaction since ${before(first.within)}`;
}

// fill has as many clients in the list as there are.
function fill(list, clients, extra) {
  while (list.children.length > clients.length) list.lastElementChild.remove();
  while (list.children.length < clients.length) list.append(copy("client-template"));
  clients.forEach((c, i) => {
    const li = list.children[i];
    set(li.querySelector(".who"), who(c));
    set(li.querySelector(".where"), where(c));
    extra(li, c);
  });
}

for (const id of ["find", "contended"]) $(id).addEventListener("input", () => view && renderLocks());

// --- Losses and gaps ---

function renderLosses() {
  $("lost").hidden = view.losses.recent.length === 0;
  const list = $("lost-list");
  while (list.children.length > view.losses.recent.length) list.lastElementChild.remove();
  view.losses.recent.forEach((loss, i) => {
    const li = list.children[i] ?? list.appendChild(copy("loss-template"));
    set(li.querySelector(".ago"), `${duration(Math.floor(loss.ago / 1000) * 1000)} ago`);
    li.classList.toggle("past", !recent(loss));
    set(li.querySelector(".key"), loss.key);
    set(li.querySelector(".tag"), loss.strategy);
    set(li.querySelector(".why"), loss.who ? `${loss.who}: ${loss.why}` : loss.why);
  });
}

function renderGaps() {
  $("gaps").hidden = view.gaps.length === 0;
  set($("gaps-count"), `(${view.gaps.length})`);
  const list = $("gaps-list");
  while (list.children.length > view.gaps.length) list.lastElementChild.remove();
  view.gaps.forEach((gap, i) => {
    const div = list.children[i] ?? list.appendChild(copy("gap-template"));
    set(div.querySelector("dt"), gap.what);
    set(div.querySelector(".why"), gap.why);
    div.querySelector(".remedy").hidden = !gap.remedy;
    set(div.querySelector("code"), gap.remedy ?? "");
  });
}

// --- Release ---

let asked = null; // the lock that somebody is asked about

function ask(lock) {
  asked = lock;
  set($("confirm-key"), lock.key);
  set($("confirm-text"), consequence(lock));
  $("confirm-reason").value = "";
  $("confirm-trouble").hidden = true;
  $("confirm-yes").disabled = false;
  $("confirm").showModal();
}

function consequence(lock) {
  const people = lock.holders.map(who).join(", ");
  if (lock.strategy === "lease") return `${people} loses the lease: what it has not committed under it never will be. Who waits gets it within five seconds.`;
  const conns = lock.holders.filter((c) => c.conn).map((c) => c.conn).join(", ");
  const end = `This ends the database connection ${conns} of ${people}`;
  if (lock.strategy === "row") return `${end}: its transaction is rolled back.`;
  const locks = Math.max(1, ...lock.holders.map((c) => c.locks ?? 1));
  if (lock.holders.some((c) => c.locksMore)) return `${end}, and with it all of its advisory locks, of which not all are shown here.`;
  return locks > 1 ? `${end}, and with it all of its ${locks} advisory locks.` : `${end}, which has no other advisory lock.`;
}

$("confirm-yes").addEventListener("click", async () => {
  $("confirm-yes").disabled = true;
  let ok = false;
  let text;
  try {
    const answer = await fetch("page.release", {
      method: "POST",
      headers: { "Content-Type": "application/json", "X-Mysqllock-Secret": hello.secret ?? "" },
      body: JSON.stringify({ ref: asked.ref, reason: $("confirm-reason").value.trim() }),
    });
    ok = answer.ok;
    text = (await answer.text()).trim();
  } catch (failure) {
    text = `No answer: ${failure.message}`;
  }
  $("confirm-yes").disabled = false;
  if (!ok) {
    set($("confirm-trouble"), text);
    $("confirm-trouble").hidden = false;
    return;
  }
  set($("result"), `${asked.key}: ${text}`);
  $("result").hidden = false;
  $("confirm").close();
});

$("confirm").addEventListener("close", () => {
  if (document.activeElement === document.body) $("locks-title").focus(); // the button is gone
});

open();
