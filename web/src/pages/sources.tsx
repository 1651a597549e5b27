/** What was found in the paths: runs, training, pools, boards, audits, attacks, online services. */
import { Button, SegmentedControl, TextInput } from "@mantine/core";
import { useMemo, useRef, useState } from "react";
import { Link, useLocation } from "wouter";
import type { Kind, Source, Sources } from "../api";
import { useAnswer, embedded } from "../data";
import { ago, count, dollars, duration, percent, plural, when, whole } from "../format";
import { Icon } from "../icons";
import { useKeys } from "../keys";
import { to, useQuery } from "../router";
import { Blank, EstimateBar, Head, Reasons, Section, Shown, StateMark, interval } from "../ui";

export const PLACES: Record<Kind, string> = {
  run: "runs",
  training: "training",
  pool: "pools",
  board: "boards",
  audit: "audits",
  attack: "attacks",
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
            <TextInput
              ref={field}
              className="grow"
              size="xs"
              type="search"
              aria-label="Filter by name"
              placeholder="Filter by name, agent, model"
              leftSection={<Icon name="search" />}
              value={text}
              onChange={(event) => change({ q: event.currentTarget.value })}
            />
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

function useMost<T>(rows: T[]): [T[], React.ReactNode] {
  const [most, set] = useState(MOST);
  return [
    rows.slice(0, most),
    rows.length > most && (
      <button className="more" onClick={() => set(most + 1000)}>
        Show more ({whole(rows.length - most)} left)
      </button>
    ),
  ];
}

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

function Runs({ rows, picked, pick }: { rows: Source[]; picked: string[]; pick: (ids: string[]) => void }) {
  const [shown, more] = useMost(rows);
  return (
    <div className="card flush">
      <div className="scroll" role="group" aria-label="Runs" tabIndex={0}>
        <table className="table rows">
          <thead>
            <tr>
              {!embedded && (
                <th scope="col">
                  <span className="hidden">Compare</span>
                </th>
              )}
              <th scope="col">run</th>
              <th scope="col" className="big-only">
                task set
              </th>
              <th scope="col" className="num">
                episodes
              </th>
              <th scope="col" className="num">
                strict
              </th>
              <th scope="col">95% interval</th>
              <th scope="col" className="num">
                official
              </th>
              <th scope="col" className="num">
                cost
              </th>
              <th scope="col" className="num">
                tokens
              </th>
              <th scope="col" className="num">
                time
              </th>
              <th scope="col" className="num">
                infra
              </th>
              <th scope="col" className="num">
                changed
              </th>
            </tr>
          </thead>
          <tbody>
            {shown.map((source) => {
              const run = source.run;
              return (
                <tr key={source.id}>
                  {!embedded && (
                    <td>
                      <input
                        type="checkbox"
                        disabled={!run}
                        aria-label={`Compare ${source.name}`}
                        checked={picked.includes(source.id)}
                        onChange={(event) =>
                          pick(event.currentTarget.checked ? [...picked, source.id].slice(-2) : picked.filter((id) => id !== source.id))
                        }
                      />
                    </td>
                  )}
                  <td className="grow" style={{ minWidth: 200 }}>
                    <Name source={source} />
                  </td>
                  <td className="big-only" style={{ minWidth: 110 }}>
                    {run?.task_set}
                  </td>
                  <td className="num">{run ? `${whole(run.episodes)} / ${whole(run.planned)}` : "–"}</td>
                  <td className="num">
                    <b>{percent(run?.strict?.value)}</b>
                  </td>
                  <td style={{ minWidth: 150 }}>
                    {run?.strict && (
                      <>
                        <EstimateBar estimate={run.strict} />
                        <span className="soft" style={{ fontSize: 11.5 }}>
                          {interval(run.strict)}
                        </span>
                      </>
                    )}
                  </td>
                  <td className="num">{percent(run?.official?.value)}</td>
                  <td className="num">{run ? dollars(run.cost_usd) : "–"}</td>
                  <td className="num">{run ? count(run.tokens) : "–"}</td>
                  <td className="num">{run ? duration(run.seconds) : "–"}</td>
                  <td className="num">{run ? percent(run.infra_rate) : "–"}</td>
                  <td className="num soft">
                    <time title={when(source.changed)}>{ago(source.changed)}</time>
                  </td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
      {more}
    </div>
  );
}

function Trainings({ rows, all }: { rows: Source[]; all: Source[] }) {
  const [shown, more] = useMost(rows);
  return (
    <div className="card flush">
      <div className="scroll" role="group" aria-label="Training" tabIndex={0}>
        <table className="table rows">
          <thead>
            <tr>
              <th scope="col">run</th>
              <th scope="col">method</th>
              <th scope="col" className="num">
                steps
              </th>
              <th scope="col" className="num">
                newest score
              </th>
              <th scope="col">split</th>
              <th scope="col">pool</th>
              <th scope="col" className="num">
                changed
              </th>
            </tr>
          </thead>
          <tbody>
            {shown.map((source) => {
              const of = source.training;
              const pool = all.find((other) => other.kind === "pool" && other.parent === source.id);
              return (
                <tr key={source.id}>
                  <td className="grow" style={{ minWidth: 200 }}>
                    <Name source={source} />
                  </td>
                  <td>{of?.method}</td>
                  <td className="num">{whole(of?.steps)}</td>
                  <td className="num">
                    {of?.score ? (
                      <>
                        <b>{percent(of.score.score)}</b> <span className="soft">{interval(of.score)}</span>
                      </>
                    ) : (
                      "–"
                    )}
                  </td>
                  <td>{of?.score && `${of.score.split}, ${of.score.greedy ? "greedy" : "sampled"}`}</td>
                  <td>{pool && <Link href={placeOf(pool)}>{pool.name}</Link>}</td>
                  <td className="num soft">
                    <time title={when(source.changed)}>{ago(source.changed)}</time>
                  </td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
      {more}
    </div>
  );
}

function Others({ rows, all }: { rows: Source[]; all: Source[] }) {
  const [shown, more] = useMost(rows);
  return (
    <div className="card flush">
      <div className="scroll" role="group" aria-label="Sources" tabIndex={0}>
        <table className="table rows">
          <thead>
            <tr>
              <th scope="col">name</th>
              <th scope="col">belongs to</th>
              <th scope="col">path</th>
              <th scope="col" className="num">
                changed
              </th>
            </tr>
          </thead>
          <tbody>
            {shown.map((source) => {
              const parent = all.find((other) => other.id === source.parent);
              return (
                <tr key={source.id}>
                  <td className="grow" style={{ minWidth: 200 }}>
                    <Name source={source} />
                  </td>
                  <td>{parent && <Link href={placeOf(parent)}>{parent.name}</Link>}</td>
                  <td className="soft">{source.path}</td>
                  <td className="num soft">
                    <time title={when(source.changed)}>{ago(source.changed)}</time>
                  </td>
                </tr>
              );
            })}
          </tbody>
        </table>
      </div>
      {more}
    </div>
  );
}

