/** Run b against run a, paired by task. */
import { Link } from "wouter";
import type { Compare, Difference, Side, Sources, TaskDifference } from "../api";
import { query as asQuery, useAnswer } from "../data";
import { count, dollars, duration, number, percent, plural, signed, whole } from "../format";
import { Choice } from "../lists";
import { to, useQuery } from "../router";
import { Blank, Head, Listing, Mark, Notes, Notice, Reasons, Section, Shown, Table, Tile, Whisker } from "../ui";

const LABELS: Record<string, string> = { strict: "Strict", official: "Official", corrected: "Baseline-adjusted" };

export function ComparePage() {
  const [query, change] = useQuery();
  const [a, b] = [query.get("a") ?? "", query.get("b") ?? ""];
  const asked = useAnswer<Compare>(a && b ? "compare" + asQuery({ a, b }) : null);
  const sources = useAnswer<Sources>("sources");
  const runs = (sources.data?.sources ?? []).filter((source) => source.kind === "run");
  return (
    <>
      <Head title="Compare two runs" crumbs={[["Sources", "/"]]} />
      <div className="filters">
        {(
          [
            ["a", "First run (a)", a],
            ["b", "Second run (b)", b],
          ] as const
        ).map(([name, label, value]) => (
          <span key={name} className="actions">
            <b aria-hidden="true">{name}</b>
            <Choice
              label={label}
              first={label}
              value={value}
              onChange={(run) => change({ [name]: run })}
              style={{ maxWidth: 360 }}
              options={runs.map((run) => [run.id, run.name])}
            />
          </span>
        ))}
        {a && b && (
          <button className="more" style={{ alignSelf: "end" }} onClick={() => change({ a: b, b: a })}>
            Swap
          </button>
        )}
      </div>
      {a && b ? (
        <Shown asked={asked}>{(data) => <Result data={data} />}</Shown>
      ) : (
        <Blank small title="Choose two runs">
          <p>Runs over the same tasks are compared task by task.</p>
        </Blank>
      )}
    </>
  );
}

function Result({ data }: { data: Compare }) {
  return (
    <>
      {data.refused && (
        <Notice kind="warn">
          <b>These runs cannot be compared.</b> {data.refused}
        </Notice>
      )}
      <Notes notes={data.notes} />
      {Object.entries(data.left_out).map(([reason, tasks]) => (
        <Reasons key={reason} title={`${plural(tasks.length, "task")} left out: ${reason}`} rows={tasks} />
      ))}
      {!data.refused && (
        <>
          <p className="soft" style={{ marginBottom: 12 }}>
            {plural(data.tasks, "common task")}. A positive difference means that b is better. Two runs are called different only if the {percent(1 - data.alpha, 0)} interval excludes 0
            and the test rejects equality.
          </p>
          <div className="tiles wide">
            {Object.entries(data.scores).map(([name, difference]) => (
              <Score key={name} label={LABELS[name] ?? name} difference={difference} a={data.a.means[name]} b={data.b.means[name]} power={data.power} />
            ))}
          </div>
        </>
      )}
      <Section title="Cost and time">
        <Sides a={data.a} b={data.b} />
      </Section>
      {data.checks.length > 0 && (
        <Listing
          title="Checks not passed"
          aside="share of graded episodes, largest difference first"
          most={15}
          cols={[
            { name: "check", grow: true, cell: (row) => <code>{row.name}</code> },
            { name: "a", num: true, cell: (row) => percent(row.a) },
            { name: "b", num: true, cell: (row) => percent(row.b) },
            { name: "b − a, points", num: true, cell: (row) => <b>{signed(row.b - row.a)}</b> },
          ]}
          rows={data.checks}
        />
      )}
      {data.by_task.length > 0 && <Tasks data={data} />}
    </>
  );
}

function Score({ label, difference: d, a, b, power }: { label: string; difference: Difference; a: number | undefined; b: number | undefined; power: number }) {
  const most = Math.max(0.05, Math.abs(d.low), Math.abs(d.high));
  const kind = d.verdict === "not told apart" ? "" : d.verdict;
  return (
    <Tile
      label={`${label}, b − a`}
      value={
        <>
          {signed(d.value)} <small>points</small>
        </>
      }
      note={
        <>
          95% interval {signed(d.low)} to {signed(d.high)} · p = {number(d.p, 2)} ({d.test})<br />b ahead in {whole(d.ahead)}, behind in {whole(d.behind)} of {plural(d.tasks, "task")}
          <br />
          Minimum detectable difference {(100 * d.detectable).toFixed(1)} points ({percent(power, 0)} power)
        </>
      }
    >
      <div style={{ display: "flex", flexWrap: "wrap", gap: "4px 8px", alignItems: "center", margin: "4px 0" }}>
        <Mark kind={kind} icon={kind === "better" ? "up" : kind === "worse" ? "down" : "none"}>
          {d.verdict === "not told apart" ? "no significant difference" : `b is ${d.verdict}`}
        </Mark>
        <span className="soft">
          {percent(a)} → {percent(b)}
        </span>
      </div>
      <Whisker value={d.value} low={d.low} high={d.high} from={-most} to={most} label={`${signed(d.value)} points, 95% interval ${signed(d.low)} to ${signed(d.high)}`} />
    </Tile>
  );
}

function Sides({ a, b }: { a: Side; b: Side }) {
  const total = (side: Side) => Object.values(side.seconds).reduce((x, y) => x + y, 0);
  const rows: [string, (side: Side) => string][] = [
    ["Agent and model", (side) => side.name],
    ["Samples per task", (side) => whole(side.samples)],
    ["Tokens in", (side) => count(side.usage.prompt_tokens)],
    ["Tokens out", (side) => count(side.usage.completion_tokens)],
    ["Tokens per solved episode", (side) => count(side.tokens_per_solved)],
    ["Cost", (side) => dollars(side.usage.cost_usd)],
    ["Cost per solved episode", (side) => dollars(side.cost_per_solved)],
    ["Time, all phases", (side) => duration(total(side))],
    ...[...new Set([...Object.keys(a.seconds), ...Object.keys(b.seconds)])].map((phase): [string, (side: Side) => string] => [`Time: ${phase}`, (side) => duration(side.seconds[phase])]),
    ["Infrastructure errors", (side) => percent(side.infra_share)],
    ["Episodes without a result", (side) => whole(side.missing)],
  ];
  return (
    <Table
      card
      label="Cost and time of both runs"
      cols={[
        { name: "", grow: true, cell: ([name]) => <span className="soft">{name}</span> },
        { name: `a: ${a.run}`, num: true, cell: ([, of]) => of(a) },
        { name: `b: ${b.run}`, num: true, cell: ([, of]) => of(b) },
      ]}
      rows={rows}
    />
  );
}

function Tasks({ data }: { data: Compare }) {
  const [query, change] = useQuery();
  const only = query.get("only") ?? "differ";
  const rows = data.by_task.filter((row) => only === "all" || row.official[0] !== row.official[1] || row.strict[0] !== row.strict[1]);
  const cell = (row: TaskDifference, side: 0 | 1) => {
    const name = row.episodes[side];
    const text = percent(row.official[side]);
    return name ? <Link href={to("runs", side ? data.b.id : data.a.id, "episodes", name)}>{text}</Link> : text;
  };
  return (
    <Section
      title="By task"
      aside={
        <Choice
          label="Which tasks"
          value={only}
          onChange={(value) => change({ only: value === "differ" ? "" : value })}
          options={[
            ["differ", "Tasks that differ"],
            ["all", "All tasks"],
          ]}
        />
      }
    >
      {rows.length === 0 ? (
        <p className="soft">No task differs.</p>
      ) : (
        <Table
          card
          most={100}
          label="Differences by task"
          cols={[
            { name: "task", grow: true, cell: (row) => row.task },
            { name: "category", cell: (row) => <span className="soft">{row.category}</span> },
            { name: "official a", num: true, cell: (row) => cell(row, 0) },
            { name: "official b", num: true, cell: (row) => cell(row, 1) },
            {
              name: "b − a, points",
              num: true,
              cell: (row) => {
                const by = row.official[1] - row.official[0];
                return (
                  <Mark kind={by > 0 ? "better" : by < 0 ? "worse" : ""} {...(by ? { icon: by > 0 ? ("up" as const) : ("down" as const) } : {})}>
                    {signed(by)}
                  </Mark>
                );
              },
            },
            { name: "strict a", num: true, cell: (row) => percent(row.strict[0], 0) },
            { name: "strict b", num: true, cell: (row) => percent(row.strict[1], 0) },
          ]}
          rows={rows}
        />
      )}
    </Section>
  );
}
