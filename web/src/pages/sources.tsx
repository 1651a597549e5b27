/** What was found in the paths: runs, training, pools, boards, audits, attacks, online services. */
import { Button, SegmentedControl } from "@mantine/core";
import { useMemo, useRef, useState } from "react";
import { Link, useLocation } from "wouter";
import type { Kind, Source, Sources } from "../api";
import { useAnswer, embedded } from "../data";
import { ago, count, dollars, duration, percent, plural, when, whole } from "../format";
import { useKeys } from "../keys";
import { to, useQuery } from "../router";
import { Blank, type Col, EstimateBar, FilterField, Head, Reasons, Section, Shown, StateMark, Table, interval } from "../ui";

export const PLACES: Record<Kind, string> = {
  run: "runs",
  training: "training",
  pool: "pools",
  board: "boards",
  audit: "audits",
  attack: "attacks",
  experiment: "experiments",
  online: "online",
};

const TITLES: [Kind, string][] = [
  ["run", "Runs"],
  ["training", "Training"],
  ["board", "Boards"],
  ["online", "Online"],
  ["pool", "Pools"],
  ["audit", "Audits"],
  ["attack", "Attacks"],
  ["experiment", "Experiments"],
];

export const placeOf = (source: Source) => to(PLACES[source.kind], source.id);

export function SourcesPage() {
  const asked = useAnswer<Sources>("sources", "sources");
  return <Shown asked={asked}>{(data) => <List data={data} />}</Shown>;
}

function List({ data }: { data: Sources }) {
  const [query, change] = useQuery();
  const field = useRef<HTMLInputElement>(null);
  const [picked, pick] = useState<string[]>([]);
  const [, navigate] = useLocation();
  const kind = query.get("kind") ?? "";
  const text = query.get("q") ?? "";
  useKeys({
    "/": () => field.current?.focus(),
    j: () => step(1),
    k: () => step(-1),
  });
  const kinds = TITLES.filter(([name]) => data.sources.some((source) => source.kind === name));
  const shown = useMemo(() => {
    const low = text.toLowerCase();
    return data.sources
      .filter((source) => !kind || source.kind === kind)
      .filter((source) => !low || [source.name, source.path, source.label, source.run?.task_set].some((part) => part?.toLowerCase().includes(low)))
      .sort((a, b) => b.changed - a.changed);
  }, [data, kind, text]);
  const running = data.sources.filter((source) => source.state === "running").length;
  return (
    <>
      <Head
        title="Sources"
        facts={embedded ? [] : [["Paths", data.paths.join(", ")], ["ClawGym", data.library], ...(running ? [["Running now", whole(running)] as [string, string]] : [])]}
      />
      <Reasons title={`${plural(data.problems.length, "problem")} while reading the paths`} rows={data.problems} />
      {data.sources.length === 0 ? (
        <Blank title="No runs were found">
          <p>Nothing that ClawGym wrote is in {data.paths.join(", ")}. Make a run, or start the viewer with another folder:</p>
          <pre>clawgym eval terminal-basic --agent oracle{"\n"}clawgym view runs/</pre>
        </Blank>
      ) : (
        <>
          <div className="filters">
            {kinds.length > 1 && (
              <div className="scroll">
                <SegmentedControl
                  size="xs"
                  aria-label="Kind"
                  value={kind}
                  onChange={(value) => change({ kind: value })}
                  data={[{ value: "", label: `All ${data.sources.length}` }, ...kinds.map(([value, label]) => ({ value, label }))]}
                />
              </div>
            )}
            <FilterField field={field} label="Filter by name" placeholder="Filter by name, agent, model" value={text} change={(q) => change({ q })} />
            {picked.length > 0 && (
              <span className="actions">
                <Button
                  size="xs"
                  disabled={picked.length !== 2}
                  onClick={() => navigate(`/compare?a=${encodeURIComponent(picked[0] ?? "")}&b=${encodeURIComponent(picked[1] ?? "")}`)}
                >
                  {picked.length === 2 ? "Compare the two runs" : "Choose one more run to compare"}
                </Button>
                <button className="more" onClick={() => pick([])}>
                  Clear
                </button>
              </span>
            )}
          </div>
          {shown.length === 0 && (
            <Blank small title="Nothing matches">
              <button className="more" onClick={() => change({ q: "", kind: "" })}>
                Show all sources
              </button>
            </Blank>
          )}
          {TITLES.map(([name, title]) => {
            const rows = shown.filter((source) => source.kind === name);
            if (!rows.length) return null;
            return (
              <Section key={name} title={title} aside={whole(rows.length)}>
                {name === "run" ? (
                  <Runs rows={rows} picked={picked} pick={pick} />
                ) : name === "training" ? (
                  <Trainings rows={rows} all={data.sources} />
                ) : (
                  <Others rows={rows} all={data.sources} />
                )}
              </Section>
            );
          })}
        </>
      )}
    </>
  );
}

/** Move the focus among the links of the lists. */
function step(by: number): boolean {
  const links = [...document.querySelectorAll<HTMLElement>("main .source")];
  const here = links.indexOf(document.activeElement as HTMLElement);
  const next = links[here < 0 ? (by > 0 ? 0 : links.length - 1) : here + by];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
  return Boolean(next);
}

const MOST = 200;

function Name({ source }: { source: Source }) {
  return (
    <>
      <Link href={placeOf(source)} className="source">
        <b>{source.name}</b>
      </Link>{" "}
      {source.state !== "complete" && <StateMark state={source.state} />}
      <div className="soft" title={source.path}>
        {source.problem || source.label || source.path}
      </div>
    </>
  );
}

const CHANGED: Col<Source> = {
  name: "changed",
  num: true,
  cell: (source) => (
    <time className="soft" title={when(source.changed)}>
      {ago(source.changed)}
    </time>
  ),
};

/** The column that names a source. */
const named = (name: string): Col<Source> => ({
  name,
  grow: true,
  cell: (source) => (
    <div style={{ minWidth: 200 }}>
      <Name source={source} />
    </div>
  ),
});

const RUN: Col<Source>[] = [
  named("run"),
  { name: "task set", wide: true, cell: ({ run }) => <div style={{ minWidth: 130 }}>{run?.task_set}</div> },
  { name: "episodes", num: true, cell: ({ run }) => (run ? `${whole(run.episodes)} / ${whole(run.planned)}` : "–") },
  { name: "strict", num: true, cell: ({ run }) => <b>{percent(run?.strict?.value)}</b> },
  {
    name: "95% interval",
    cell: ({ run }) => (
      <div style={{ minWidth: 150 }}>
        {run?.strict && (
          <>
            <EstimateBar estimate={run.strict} />
            <span className="soft" style={{ fontSize: 11.5 }}>
              {interval(run.strict)}
            </span>
          </>
        )}
      </div>
    ),
  },
  { name: "official", num: true, cell: ({ run }) => percent(run?.official?.value) },
  { name: "cost", num: true, cell: ({ run }) => (run ? dollars(run.cost_usd) : "–") },
  { name: "tokens", num: true, cell: ({ run }) => (run ? count(run.tokens) : "–") },
  { name: "time", num: true, cell: ({ run }) => (run ? duration(run.seconds) : "–") },
  { name: "infra", num: true, cell: ({ run }) => (run ? percent(run.infra_rate) : "–") },
  CHANGED,
];

function Runs({ rows, picked, pick }: { rows: Source[]; picked: string[]; pick: (ids: string[]) => void }) {
  const choose: Col<Source> = {
    name: "",
    title: "Compare",
    cell: (source) => (
      <input
        type="checkbox"
        disabled={!source.run}
        aria-label={`Compare ${source.name}`}
        checked={picked.includes(source.id)}
        onChange={(event) => pick(event.currentTarget.checked ? [...picked, source.id].slice(-2) : picked.filter((id) => id !== source.id))}
      />
    ),
  };
  return <Table card label="Runs" most={MOST} id={(source) => source.id} rows={rows} cols={embedded ? RUN : [choose, ...RUN]} />;
}

function Trainings({ rows, all }: { rows: Source[]; all: Source[] }) {
  const cols: Col<Source>[] = [
    named("run"),
    { name: "method", cell: ({ training }) => training?.method },
    { name: "steps", num: true, cell: ({ training }) => whole(training?.steps) },
    {
      name: "newest score",
      num: true,
      cell: ({ training }) =>
        training?.score ? (
          <>
            <b>{percent(training.score.score)}</b> <span className="soft">{interval(training.score)}</span>
          </>
        ) : (
          "–"
        ),
    },
    { name: "split", num: true, cell: ({ training }) => training?.score && `${training.score.split}, ${training.score.greedy ? "greedy" : "sampled"}` },
    {
      name: "pool",
      cell: (source) => {
        const pool = all.find((other) => other.kind === "pool" && other.parent === source.id);
        return pool && <Link href={placeOf(pool)}>{pool.name}</Link>;
      },
    },
    CHANGED,
  ];
  return <Table card label="Training" most={MOST} id={(source) => source.id} rows={rows} cols={cols} />;
}

function Others({ rows, all }: { rows: Source[]; all: Source[] }) {
  const parentOf = (source: Source) => all.find((other) => other.id === source.parent);
  const parent: Col<Source> = {
    name: "belongs to",
    num: true,
    cell: (source) => {
      const found = parentOf(source);
      return found && <Link href={placeOf(found)}>{found.name}</Link>;
    },
  };
  const path: Col<Source> = { name: "path", num: true, wide: true, cell: (source) => source.label && <span className="soft">{source.path}</span> };
  return <Table card label="Sources" most={MOST} id={(source) => source.id} rows={rows} cols={[named("name"), ...(rows.some(parentOf) ? [parent] : []), path, CHANGED]} />;
}
