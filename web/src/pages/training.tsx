/** A training run: scores, curves, guards, versions; other runs can be laid over it. */
import { useEffect, useMemo, useRef, useState } from "react";
import { Link } from "wouter";
import type { Chart as ChartOf, Score, Sources, Training } from "../api";
import { Chart, Key, type Line } from "../chart";
import { embedded, get, useAnswer, useChanged } from "../data";
import { duration, number, percent, plural, whole } from "../format";
import { Icon } from "../icons";
import { useKeys } from "../keys";
import { Choice, Exports } from "../lists";
import { to, useQuery } from "../router";
import { Blank, FilterField, Head, Listing, Mark, Notes, Notice, Raw, Section, Shown, StateMark, Table, Tile, interval } from "../ui";

export function TrainingPage({ params }: { params: { id: string } }) {
  const asked = useAnswer<Training>(`training/${params.id}`, params.id);
  return <Shown asked={asked}>{(training) => <Page key={training.id} training={training} />}</Shown>;
}

/** Other runs that are laid over this one, as they arrive. */
function useOthers(ids: string[]): Training[] {
  const [known, set] = useState<Record<string, Training>>({});
  const changed = useChanged("sources");
  const key = ids.join(" ");
  useEffect(() => {
    let stopped = false;
    for (const id of key.split(" ").filter(Boolean))
      get<Training>(`training/${id}`).then(
        (training) => stopped || set((old) => ({ ...old, [id]: training })),
        () => undefined,
      );
    return () => void (stopped = true);
  }, [key, changed]);
  return useMemo(() => key.split(" ").flatMap((id) => known[id] ?? []), [key, known]);
}

function Page({ training }: { training: Training }) {
  const [query, change] = useQuery();
  const field = useRef<HTMLInputElement>(null);
  useKeys({ "/": () => field.current?.focus() });
  const sources = useAnswer<Sources>(embedded ? null : "sources");
  const overlaid = useMemo(() => (query.get("with") ?? "").split(",").filter((id) => id && id !== training.id).slice(0, 6), [query, training.id]);
  const others = useOthers(overlaid);
  const all = useMemo(() => [training, ...others], [training, others]);
  const text = query.get("metric") ?? "";
  const smooth = Math.max(1, Number(query.get("smooth") ?? 1) || 1);
  const choices = (sources.data?.sources ?? []).filter((source) => source.kind === "training" && source.id !== training.id && !overlaid.includes(source.id));
  const overlay = (ids: string[]) => change({ with: ids.join(",") });
  const low = text.toLowerCase();
  const matches = (chart: ChartOf) => !low || [chart.title, ...chart.metrics, ...chart.labels].some((part) => part.toLowerCase().includes(low));
  const charts = useMemo(() => merged(all), [all]);
  const main = charts.filter((chart) => chart.main && matches(chart));
  const rest = charts.filter((chart) => !chart.main && matches(chart));
  const newest = training.evaluations[training.evaluations.length - 1];
  const fired = training.guards.filter((guard) => guard.fired.length);
  const steps = training.steps[training.steps.length - 1] ?? 0;
  return (
    <>
      <Head
        title={training.name}
        crumbs={embedded ? [] : [["Sources", "/"]]}
        marks={<StateMark state={training.state} />}
        facts={training.about}
        actions={
          <>
            {training.pool && <Link href={to("pools", training.pool)}>Pool</Link>}
            <Exports address={`training/${training.id}`} name={training.name} />
          </>
        }
      />
      <Notes notes={training.notes} />
      {training.state === "running" && (
        <Notice>
          <b>Running.</b> {plural(steps, "step")} so far. This page follows.
        </Notice>
      )}
      {training.state === "incomplete" && (
        <Notice kind="warn">
          <b>Interrupted at step {whole(steps)}.</b> Run the same command again to resume from the last checkpoint.
        </Notice>
      )}
      {fired.map((guard) => (
        <Notice key={guard.name} kind="warn">
          <b>Guard {guard.name} fired</b> at {plural(guard.fired.length, "step")} (first {whole(guard.fired[0])}): {guard.metric} was beyond {number(guard.limit)}.
        </Notice>
      ))}
      <div className="tiles">
        <Tile label="Steps" value={whole(steps)} note={training.checkpoints.length ? `${plural(training.checkpoints.length, "checkpoint")}` : "no checkpoint yet"} />
        {newest && (
          <Tile
            label={`Newest score, ${newest.split}`}
            value={
              <>
                {(100 * newest.score).toFixed(1)}
                <small>%</small>
              </>
            }
            note={`${interval(newest)}, step ${whole(newest.step)}, ${plural(newest.episodes, "episode")}`}
          />
        )}
        {(
          [
            ["staleness/mean", "Staleness", "policy versions, mean of the last step"],
            ["training/rollout_probs_diff", "Mismatch", "difference of token probabilities, trainer and engine"],
            ["perf/trainer_idle_ratio", "Trainer idle", "share of the last step"],
            ["perf/rollout_idle_ratio", "Rollouts idle", "share of the last step"],
          ] as const
        ).map(([metric, label, note]) => {
          const value = training.metrics[metric]?.findLast((each) => each !== null);
          return value == null ? null : <Tile key={metric} label={label} value={metric.startsWith("perf") ? percent(value, 0) : number(value)} note={note} />;
        })}
        <Tile
          label="Guards"
          value={training.guards.length ? `${fired.length} of ${training.guards.length}` : "none"}
          note={training.guards.length ? (fired.length ? "have fired" : "have fired: all metrics stayed within their limits") : "no limit is set"}
        />
      </div>
      <div className="filters" style={{ marginTop: 24 }}>
        <FilterField field={field} label="Filter curves" placeholder="Filter curves by name" value={text} change={(metric) => change({ metric })} />
        <Choice
          label="Smoothing"
          value={String(smooth)}
          onChange={(value) => change({ smooth: value === "1" ? "" : value })}
          options={[1, 5, 20, 50].map((n) => [String(n), n === 1 ? "Not smoothed" : `Mean of ${n} steps`])}
        />
        {choices.length > 0 && (
          <Choice
            label="Lay another run over this one"
            first="Add a run…"
            value=""
            onChange={(id) => overlay([...overlaid, id])}
            options={choices.map((source) => [source.id, source.name])}
          />
        )}
        {others.map((other, at) => (
          <span key={other.id} className="mark plain">
            <Key colour={0} dash={at + 1} /> <Link href={to("training", other.id)}>{other.name}</Link>
            <button className="plainbutton" aria-label={`Remove ${other.name}`} onClick={() => overlay(overlaid.filter((id) => id !== other.id))}>
              <Icon name="cross" size={11} />
            </button>
          </span>
        ))}
      </div>
      {others.length > 0 && (
        <p className="soft" style={{ marginBottom: 8 }}>
          <Key colour={0} dash={0} /> {training.name} is drawn solid, the other runs are dashed. A metric has one colour.
        </p>
      )}
      <Evaluations all={all} filter={low} />
      {main.length > 0 && (
        <Section title="During training" aside="Drag over a curve to zoom, double-click to go back.">
          <div className="charts">
            {main.map((chart) => (
              <Curve key={chart.title} chart={chart} all={all} smooth={smooth} />
            ))}
          </div>
        </Section>
      )}
      {training.steps.length === 0 && training.evaluations.length === 0 && (
        <Blank small title="No step has been made yet">
          <p>Curves appear with the first step.</p>
        </Blank>
      )}
      {rest.length > 0 && <Rest charts={rest} all={all} smooth={smooth} open={Boolean(low)} />}
      {low && !main.length && !rest.length && (
        <Blank small title="No curve matches">
          <button className="more" onClick={() => change({ metric: "" })}>
            Show all curves
          </button>
        </Blank>
      )}
      {training.timeline.length > 0 && <Lanes training={training} />}
      <div className="two">
        {training.guards.length > 0 && (
          <Listing
            title="Guards"
            cols={[
              { name: "guard", grow: true, cell: (guard) => guard.name },
              { name: "metric", cell: (guard) => <code>{guard.metric}</code> },
              { name: "limit", num: true, cell: (guard) => number(guard.limit) },
              {
                name: "fired",
                cell: (guard) =>
                  guard.fired.length ? (
                    <Mark kind="warn" icon="warn">
                      step {guard.fired.slice(0, 5).join(", ")}
                      {guard.fired.length > 5 && ", …"}
                    </Mark>
                  ) : (
                    <Mark kind="kept" icon="check">
                      no
                    </Mark>
                  ),
              },
            ]}
            rows={training.guards}
          />
        )}
        {training.checkpoints.length > 0 && (
          <Listing
            title="Checkpoints"
            most={10}
            cols={[
              { name: "checkpoint", grow: true, cell: (checkpoint) => <code>{checkpoint.name}</code> },
              { name: "step", num: true, cell: (checkpoint) => whole(checkpoint.step) },
              {
                name: "",
                cell: (checkpoint) => (
                  <>
                    {checkpoint.best && (
                      <Mark kind="kept" icon="star">
                        best
                      </Mark>
                    )}{" "}
                    {checkpoint.last && <Mark>last</Mark>}
                  </>
                ),
              },
            ]}
            rows={training.checkpoints}
          />
        )}
        {training.data.length > 0 && (
          <Listing
            title="Data"
            cols={[
              { name: "used for", cell: (data) => data.use || "–" },
              { name: "data", grow: true, cell: (data) => data.name },
              { name: "split", cell: (data) => data.split || "–" },
              { name: "tasks", num: true, cell: (data) => whole(data.tasks) },
            ]}
            rows={training.data}
          />
        )}
      </div>
      {training.config.length > 0 && <Settings all={all} />}
      <section>
        <Raw title="Run manifest" value={training.manifest} />
      </section>
    </>
  );
}

/** The charts of all runs: those of the first, and what only others have. */
function merged(all: Training[]): ChartOf[] {
  const out = new Map<string, ChartOf>();
  for (const { charts } of all) for (const chart of charts) if (!out.has(chart.title)) out.set(chart.title, chart);
  return [...out.values()];
}

function Curve({ chart, all, smooth }: { chart: ChartOf; all: Training[]; smooth: number }) {
  const lines = useMemo(
    () =>
      all.flatMap((training, run) =>
        chart.metrics.flatMap((metric, at): Line[] => {
          const values = training.metrics[metric];
          if (!values) return [];
          const label = chart.labels[at] || metric;
          return [{ name: run ? `${label}, ${training.name}` : label, x: training.steps, y: smoothed(values, smooth), colour: at, dash: run }];
        }),
      ),
    [chart, all, smooth],
  );
  if (!lines.length) return null;
  return <Chart title={chart.title} lines={lines} sync="training" />;
}

/** The mean of the last n values at each step. */
function smoothed(values: (number | null)[], n: number): (number | null)[] {
  if (n <= 1) return values;
  const last: number[] = [];
  return values.map((value) => {
    if (value === null || !Number.isFinite(value)) return value;
    last.push(value);
    if (last.length > n) last.shift();
    return last.reduce((a, b) => a + b, 0) / last.length;
  });
}

function Evaluations({ all, filter }: { all: Training[]; filter: string }) {
  const groups = useMemo(() => {
    const out = new Map<string, Line[]>();
    all.forEach((training, run) => {
      const parts = new Map<string, Score[]>();
      for (const score of training.evaluations) {
        const name = `${score.split}, ${score.greedy ? "greedy" : "sampled"}`;
        const key = `${score.task_set}\u0000${name}`;
        parts.set(key, [...(parts.get(key) ?? []), score]);
      }
      for (const [key, scores] of parts) {
        const [set = "", name = ""] = key.split("\u0000");
        const lines = out.get(set) ?? [];
        const colour = ["heldout, sampled", "heldout, greedy", "validation, sampled", "validation, greedy"].indexOf(name);
        const percents = (of: (score: Score) => number) => scores.map((score) => 100 * of(score));
        lines.push({
          name: run ? `${name}, ${training.name}` : name,
          x: scores.map((score) => score.step),
          y: percents((score) => score.score),
          low: percents((score) => score.low),
          high: percents((score) => score.high),
          colour: colour < 0 ? lines.length : colour,
          dash: run,
        });
        out.set(set, lines);
      }
    });
    return [...out.entries()];
  }, [all]);
  if (!groups.length || (filter && !"evaluation score strict success".includes(filter))) return null;
  const rows = all[0]?.evaluations ?? [];
  return (
    <Section title="Evaluation" aside="strict success in %, with 95% intervals">
      <div className="charts">
        {groups.map(([set, lines]) => (
          <Chart key={set} title={set || "Score"} lines={lines} height={230} sync="training" />
        ))}
      </div>
      <details style={{ marginTop: 10 }}>
        <summary className="soft">All evaluations as a table</summary>
        <Table
          card
          label="Evaluations"
          cols={[
            { name: "step", num: true, cell: (row) => whole(row.step) },
            { name: "task set", grow: true, cell: (row) => row.task_set },
            { name: "split", cell: (row) => row.split },
            { name: "how", cell: (row) => (row.greedy ? "greedy" : "sampled") },
            { name: "success", num: true, cell: (row) => <b>{percent(row.score)}</b> },
            { name: "interval", num: true, cell: (row) => interval(row) },
            { name: "checks passed", num: true, cell: (row) => percent(row.partial) },
            { name: "episodes", num: true, cell: (row) => whole(row.episodes) },
            { name: "infra", num: true, cell: (row) => whole(row.infra) },
          ]}
          rows={[...rows].reverse()}
        />
      </details>
    </Section>
  );
}

function Rest({ charts, all, smooth, open }: { charts: ChartOf[]; all: Training[]; smooth: number; open: boolean }) {
  const [own, set] = useState(false);
  const [most, more] = useState(24);
  const shown = own || open;
  return (
    <Section title="All other metrics" aside={plural(charts.length, "curve")}>
      {!shown && (
        <button className="more" onClick={() => set(true)}>
          Show {plural(charts.length, "more curve")}
        </button>
      )}
      {shown && (
        <>
          <div className="charts">
            {charts.slice(0, most).map((chart) => (
              <Curve key={chart.title} chart={chart} all={all} smooth={smooth} />
            ))}
          </div>
          {charts.length > most && (
            <button className="more" onClick={() => more(most + 48)}>
              Show more ({whole(charts.length - most)} left)
            </button>
          )}
        </>
      )}
    </Section>
  );
}

/** One lane for each loop: when it was busy. */
function Lanes({ training }: { training: Training }) {
  const spans = training.timeline.slice(-600);
  const loops = [...new Set(spans.map((span) => span.loop))];
  const begin = Math.min(...spans.map((span) => span.start));
  const end = Math.max(...spans.map((span) => span.end), begin + 1e-9);
  const x = (at: number) => (1000 * (at - begin)) / (end - begin);
  const busy = (loop: string) => spans.filter((span) => span.loop === loop).reduce((sum, span) => sum + span.end - span.start, 0) / (end - begin);
  return (
    <Section title="Timeline of the loops" aside={`${duration(end - begin)}${training.timeline.length > 600 ? ", the last 600 spans" : ""}`}>
      <div className="card" style={{ display: "grid", gridTemplateColumns: "auto minmax(0, 1fr) auto", gap: "8px 14px", alignItems: "center" }}>
        {loops.map((loop, n) => (
          <div key={loop} style={{ display: "contents" }}>
            <div>{loop}</div>
            <svg viewBox="0 0 1000 20" preserveAspectRatio="none" width="100%" height={20} role="img" aria-label={`${loop}: busy ${percent(busy(loop), 0)} of the time`} style={{ background: "var(--sunk)", borderRadius: 4 }}>
              {spans
                .filter((span) => span.loop === loop)
                .map((span, at) => (
                  <rect key={at} x={x(span.start)} width={Math.max(1, x(span.end) - x(span.start) - 1)} y={3} height={14} fill={`var(--c${n % 7})`}>
                    <title>{`step ${span.step}: ${duration(span.end - span.start)}`}</title>
                  </rect>
                ))}
            </svg>
            <div className="num soft">{percent(busy(loop), 0)} busy</div>
          </div>
        ))}
      </div>
    </Section>
  );
}

/** Settings of the runs beside one another; those that differ first. */
function Settings({ all }: { all: Training[] }) {
  const maps = all.map((training) => new Map(training.config));
  const names = [...new Set(all.flatMap((training) => training.config.map(([name]) => name)))];
  const differs = (name: string) => new Set(maps.map((map) => map.get(name))).size > 1;
  const rows = all.length > 1 ? [...names.filter(differs), ...names.filter((name) => !differs(name))] : names;
  return (
    <Listing
      title="Configuration"
      aside={all.length > 1 ? `${plural(names.filter(differs).length, "setting")} differ` : plural(names.length, "setting")}
      most={all.length > 1 ? 20 : 12}
      cols={[
        {
          name: "setting",
          cell: (name) => (
            <>
              <code>{name}</code> {all.length > 1 && differs(name) && <Mark kind="warn">differs</Mark>}
            </>
          ),
        },
        ...all.map((training, at) => ({ name: training.name, grow: at === all.length - 1, cell: (name: string) => <code>{maps[at]?.get(name) ?? "–"}</code> })),
      ]}
      rows={rows}
    />
  );
}
