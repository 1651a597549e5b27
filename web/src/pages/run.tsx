/** One run: scores with intervals, what fails, cost and time, and its episodes. */
import { useEffect, useMemo, useRef, useState } from "react";
import { Link, useLocation } from "wouter";
import type { EpisodeLine, Estimate, GroupScores, Run, Scores, Sources, Summary } from "../api";
import { embedded, useAnswer, usePaged, type Paged } from "../data";
import { count, dollars, duration, number, percent, plural, whole } from "../format";
import { useKeys } from "../keys";
import { Choice, Clear, Exports, FILTERS, Select, listQuery } from "../lists";
import { to, useQuery } from "../router";
import { Bars, Blank, Counts, EstimateBar, FilterField, Head, Histogram, Listing, Notes, Notice, OutcomeMark, Raw, Reasons, Section, Shown, StateMark, Table, Tile, interval, outcomeName } from "../ui";
import { Found, VirtualTable, type VCol } from "../vtable";

export function RunPage({ params }: { params: { id: string } }) {
  const asked = useAnswer<Run>(`runs/${params.id}`, params.id);
  return <Shown asked={asked}>{(run) => <Page run={run} />}</Shown>;
}

function Page({ run }: { run: Run }) {
  return (
    <>
      <Head
        title={run.name}
        crumbs={embedded ? [] : [["Sources", "/"]]}
        marks={<StateMark state={run.state} />}
        facts={run.about}
        actions={<CompareWith id={run.id} />}
      />
      <Notes notes={run.notes} />
      {run.summary ? (
        <Results run={run} s={run.summary} />
      ) : (
        <Notice>
          <b>The scores are being computed.</b> They appear here in a moment.
        </Notice>
      )}
      <Episodes run={run} />
      <section>
        <Raw title="Run manifest" value={run.manifest} />
      </section>
    </>
  );
}

function Results({ run, s }: { run: Run; s: Summary }) {
  const none = s.scores.episodes === 0;
  return (
    <>
      {run.state === "running" && (
        <Notice>
          <b>Running.</b> {whole(s.scores.episodes)} of {plural(s.planned, "episode")} have a result. This page follows.
        </Notice>
      )}
      {run.state !== "running" && !s.complete && s.planned > 0 && s.missing.length > s.infra_episodes && (
        <Notice kind="warn">
          <b>{none ? "No episode has a result yet." : "Incomplete."}</b> {whole(s.missing.length)} of {plural(s.planned, "episode")} have no
          result. Run the same command again to resume.
        </Notice>
      )}
      {s.scores_infra_zero && (
        <Notice kind="warn">
          <b>{plural(s.infra_episodes, "episode")} ended by infrastructure errors.</b> If they counted as 0, the strict score would be{" "}
          {percent(s.scores_infra_zero.strict?.value)}. Run the same command again to retry them.
        </Notice>
      )}
      {s.tampered.length > 0 && (
        <Notice kind="warn">
          <b>{plural(s.tampered.length, "episode")} with tampered inputs.</b> Restoring the inputs that the agent changed gave other checks. The
          strict score uses the restored inputs.
        </Notice>
      )}
      <Reasons title={`${plural(Object.keys(s.unsupported).length, "task")} unsupported here, not scored`} rows={s.unsupported} />
      <Reasons title={`${plural(Object.keys(s.problems).length, "task")} could not be read`} rows={s.problems} />
      {!none && <Overview run={run} s={s} />}
    </>
  );
}

function CompareWith({ id }: { id: string }) {
  const [, navigate] = useLocation();
  const asked = useAnswer<Sources>(embedded ? null : "sources");
  const others = (asked.data?.sources ?? []).filter((source) => source.kind === "run" && source.id !== id);
  if (!others.length) return null;
  return (
    <Choice
      label="Compare with another run"
      first="Compare with…"
      value=""
      onChange={(other) => navigate(`/compare?a=${encodeURIComponent(other)}&b=${encodeURIComponent(id)}`)}
      options={others.map((source) => [source.id, source.name])}
    />
  );
}

function Score({ label, estimate, about, main }: { label: string; estimate: Estimate | null; about: string; main?: boolean }) {
  return (
    <Tile
      label={label}
      main={main ?? false}
      value={
        estimate ? (
          <>
            {(100 * estimate.value).toFixed(1)}
            <small>%</small>
          </>
        ) : (
          "–"
        )
      }
      note={about}
    >
      {estimate && (
        <>
          <EstimateBar estimate={estimate} />
          <div className="note">95% interval {interval(estimate)}</div>
        </>
      )}
    </Tile>
  );
}

function Overview({ run, s }: { run: Run; s: Summary }) {
  const [, change] = useQuery();
  const graded = Math.max(1, s.scores.episodes);
  const tokens = s.usage.prompt_tokens + s.usage.completion_tokens;
  const filter = (values: Record<string, string>) => {
    change({ check: "", outcome: "", q: "", category: "", ...values });
    document.getElementById("episodes")?.scrollIntoView();
  };
  const failing = run.checks.filter((check) => check.failed > 0);
  return (
    <>
      <div className="tiles wide">
        <Score main label="Strict" estimate={s.scores.strict} about="Share of episodes in which every check passes, with changed inputs restored." />
        <Score label="Official" estimate={s.scores.official} about="Mean score of the original grader." />
        <Score
          label="Baseline-adjusted"
          estimate={s.scores.corrected}
          about={s.scores.corrected ? "0 is the best policy without a model, 100 is the full score." : "No no-model baseline is known for these tasks."}
        />
        <Tile
          label="Episodes"
          value={
            <>
              {whole(s.scores.episodes)} <small>/ {whole(s.planned)}</small>
            </>
          }
          note={
            s.detectable.strict !== undefined
              ? `Minimum detectable difference to another run: ${(100 * s.detectable.strict).toFixed(1)} points strict (80% power).`
              : ""
          }
        >
          <ul style={{ display: "grid", gap: 3, margin: "6px 0" }}>
            {Object.entries(s.outcomes).map(([outcome, n]) => (
              <li key={outcome} style={{ display: "flex", gap: 8 }}>
                <button className="plainbutton" onClick={() => filter({ outcome })} title="Show these episodes">
                  <OutcomeMark outcome={outcome} />
                </button>
                <b>{whole(n)}</b> <span className="soft">{percent(n / graded, 0)}</span>
              </li>
            ))}
          </ul>
        </Tile>
      </div>
      <section aria-label="Cost and time">
        <div className="tiles">
          {tokens > 0 && (
            <>
              <Tile
                label="Tokens in"
                value={count(s.usage.prompt_tokens)}
                note={s.usage.prompt_tokens ? `${percent(s.usage.cached_tokens / s.usage.prompt_tokens, 0)} cached` : ""}
              />
              <Tile label="Tokens out" value={count(s.usage.completion_tokens)} note={`${count(s.usage.completion_tokens / graded)} per episode`} />
            </>
          )}
          {s.tokens_per_solved !== null && <Tile label="Tokens per solved episode" value={count(s.tokens_per_solved)} note="in and out, over all episodes" />}
          {s.usage.cost_usd !== null && (
            <Tile label="Cost" value={dollars(s.usage.cost_usd)} note={s.cost_per_solved !== null ? `${dollars(s.cost_per_solved)} per solved episode` : ""} />
          )}
          {run.slowest && (
            <Tile
              label="Time of an episode"
              value={duration(run.slowest.median)}
              note={`median; 95% within ${duration(run.slowest.p95)}, at most ${duration(run.slowest.max)}`}
            />
          )}
          <Tile
            label="Infrastructure errors"
            value={percent(s.infra_rate)}
            note={s.infra_attempts ? `${whole(s.infra_attempts)} of ${plural(s.attempts, "attempt")}; left out of every score` : `none in ${plural(s.attempts, "attempt")}`}
          />
        </div>
      </section>
      <div className="two">
        <Section title="Checks not passed" aside={failing.length ? "share of the episodes that have the check" : ""}>
          <div className="card">
            {failing.length ? (
              <Bars
                colour="var(--c1)"
                rows={failing.map((check) => ({
                  key: check.name,
                  share: check.share,
                  text: `${whole(check.failed)} of ${whole(check.graded)}`,
                  name: (
                    <button
                      className="plainbutton"
                      style={{ whiteSpace: "normal" }}
                      onClick={() => filter({ check: check.name })}
                      title={`Show the episodes in which it was not passed. ${plural(check.tasks, "task")}, mean score ${number(check.mean)}.`}
                    >
                      <span className="mono" style={{ overflowWrap: "anywhere" }}>
                        {check.name}
                      </span>
                    </button>
                  ),
                }))}
              />
            ) : (
              <p className="soft">Every check passed in every episode.</p>
            )}
          </div>
        </Section>
        <Section title="Distribution of official scores">
          <div className="card">
            <Histogram low={run.distribution.unsolved} high={run.distribution.solved} names={["not solved", "solved (strict)"]} />
          </div>
        </Section>
        {Object.keys(s.causes).length > 0 && (
          <Section title="Why not solved" aside="graded episodes">
            <div className="card">
              <Bars
                rows={Object.entries(s.causes).map(([cause, n]) => ({ key: cause, name: cause, share: n / graded, text: whole(n) }))}
              />
            </div>
          </Section>
        )}
        <Section title="Time by phase" aside={`${duration(Object.values(s.seconds).reduce((a, b) => a + b, 0))} in all, over the graded episodes`}>
          <div className="card">
            <Bars
              colour="var(--c2)"
              rows={Object.entries(s.seconds)
                .sort((a, b) => b[1] - a[1])
                .map(([phase, seconds]) => ({
                  key: phase,
                  name: phase,
                  share: seconds / Math.max(1e-9, ...Object.values(s.seconds)),
                  text: `${duration(seconds)} · ${duration(seconds / graded)} each`,
                }))}
            />
          </div>
        </Section>
        {s.infra_attempts > 0 && (
          <Section title="Infrastructure errors by kind" aside="attempts, retried and not scored">
            <div className="card">
              <Counts rows={Object.entries(s.infra_faults)} />
              <div style={{ height: 12 }} />
              <Bars
                most={6}
                colour="var(--c3)"
                rows={Object.entries(s.infra_causes).map(([cause, n]) => ({ key: cause, name: cause, share: n / s.infra_attempts, text: whole(n) }))}
              />
            </div>
          </Section>
        )}
        {Object.keys(s.judging).length > 0 && (
          <Listing
            title="Judges"
            aside="agreement of the votes"
            cols={[
              { name: "judge", cell: ([name]) => name, grow: true },
              { name: "episodes", num: true, cell: ([, j]) => whole(j.episodes) },
              { name: "votes read", num: true, cell: ([, j]) => `${whole(j.read)} / ${whole(j.asked)}` },
              { name: "alpha", num: true, cell: ([, j]) => number(j.alpha), title: "Krippendorff's alpha" },
              { name: "same verdict", num: true, cell: ([, j]) => percent(j.same_verdict, 0) },
              { name: "cost", num: true, cell: ([, j]) => dollars(j.cost_usd) },
            ]}
            rows={Object.entries(s.judging)}
          />
        )}
        {Object.keys(s.safety).length > 0 && (
          <Section title="Safety">
            <div className="tiles wide">
              {Object.entries(s.safety).map(([name, estimate]) => (
                <Score key={name} label={name} estimate={estimate} about="" />
              ))}
            </div>
          </Section>
        )}
      </div>
      {Object.keys(s.pass_at).length > 1 && (
        <Listing
          title="Samples"
          aside="95% intervals"
          cols={[
            { name: "", cell: (row) => row[0], grow: true },
            ...Object.keys(s.pass_at).map((k) => ({
              name: `k = ${k}`,
              num: true,
              cell: (row: [string, Record<string, Estimate>]) => (
                <>
                  <b>{percent(row[1][k]?.value)}</b> <span className="soft">{interval(row[1][k])}</span>
                </>
              ),
            })),
          ]}
          rows={[
            ["pass@k: at least one of k", s.pass_at],
            ["pass^k: all of k", s.pass_hat],
          ]}
        />
      )}
      {(
        [
          ["category", "By category"],
          ["level", "By level"],
          ["grader", "By kind of grader"],
        ] as const
      ).map(([name, title]) => {
        const groups = s.groups[name];
        if (!groups?.length) return null;
        return (
          <Section key={name} title={title}>
            <Groups title={title} rows={groups} />
          </Section>
        );
      })}
    </>
  );
}

function Groups({ title, rows }: { title: string; rows: GroupScores[] }) {
  const mean = (name: keyof Scores) => (row: GroupScores) => percent((row[name] as Estimate | null)?.value);
  return (
    <Table
      card
      label={title}
      cols={[
        { name: "group", cell: (row) => row.name, grow: true },
        { name: "episodes", num: true, cell: (row) => whole(row.episodes) },
        { name: "strict", num: true, cell: (row) => <b>{percent(row.strict?.value)}</b> },
        { name: "interval", num: true, cell: (row) => <span className="soft">{interval(row.strict)}</span> },
        { name: "0 to 100%", cell: (row) => <div style={{ width: 160 }}>{row.strict && <EstimateBar estimate={row.strict} />}</div> },
        { name: "official", num: true, cell: mean("official") },
        { name: "baseline-adjusted", num: true, cell: mean("corrected") },
      ]}
      rows={rows}
    />
  );
}

// ------------------------------------------------------------------------------------------------- episodes

function Episodes({ run }: { run: Run }) {
  const [query, change] = useQuery();
  const field = useRef<HTMLInputElement>(null);
  useKeys({ "/": () => field.current?.focus() });
  const sort = query.get("sort") ?? "order";
  const list: Paged<EpisodeLine> = usePaged(`runs/${run.id}/episodes${listQuery(query)}`, run.id);
  const set = FILTERS.filter((name) => query.get(name));
  const [text, setText] = useState(query.get("q") ?? "");
  const said = useRef(text);
  useEffect(() => {
    const now = query.get("q") ?? "";
    if (now !== said.current) {
      said.current = now;
      setText(now);
    }
  }, [query]);
  useEffect(() => {
    if (text === said.current) return;
    const timer = setTimeout(() => {
      said.current = text;
      change({ q: text });
    }, 250);
    return () => clearTimeout(timer);
  }, [text, change]);
  const keep = listQuery(query);
  const cols = useMemo(() => columns(run.id, keep), [run.id, keep]);
  const clear = set.length > 0 && <Clear names={FILTERS} />;
  return (
    <section aria-labelledby="episodes" style={{ scrollMarginTop: 60 }}>
      <div className="title">
        <h2 id="episodes" style={{ scrollMarginTop: 64 }}>
          Episodes
        </h2>
        <Found list={list} one="episode" />
      </div>
      <div className="filters">
        <FilterField field={field} label="Filter episodes by text" placeholder={embedded ? "Task or cause" : "Task, cause or text of the transcript"} value={text} change={setText} />
        <Select label="Outcome" value={query.get("outcome")} onChange={(outcome) => change({ outcome })} options={run.outcomes.map((name) => [name, outcomeName(name)])} />
        {run.categories.length > 1 && (
          <Select label="Category" value={query.get("category")} onChange={(category) => change({ category })} options={run.categories.map((name) => [name, name])} />
        )}
        {run.checks.length > 0 && (
          <Select
            label="Check not passed"
            value={query.get("check")}
            onChange={(check) => change({ check })}
            options={run.checks.filter((check) => check.failed > 0).map((check) => [check.name, `${check.name} (${check.failed})`])}
          />
        )}
        {clear}
        <span className="end actions">
          {run.indexed.done < run.indexed.total && (
            <span className="soft" role="status">
              Text search covers {whole(run.indexed.done)} of {whole(run.indexed.total)} transcripts so far
            </span>
          )}
          <Exports address={`runs/${run.id}/episodes${keep}`} name={run.name} />
        </span>
      </div>
      <VirtualTable
        label="Episodes"
        list={list}
        cols={cols}
        sort={sort}
        onSort={(by) => change({ sort: by === "order" ? "" : by })}
        empty={
          <Blank small title={set.length ? "No episode matches these filters" : "No episodes yet"}>
            {clear || <p>Scores and episodes appear with the first one that ends.</p>}
          </Blank>
        }
      />
    </section>
  );
}

function columns(id: string, keep: string): VCol<EpisodeLine>[] {
  return [
    {
      name: "task",
      sort: "task",
      width: "minmax(96px, 2.4fr)",
      phone: true,
      cell: (row, index) => (
        <div className="two-lines">
          <div className="cut">
            <Link className="open" href={`${to("runs", id, "episodes", row.name)}${keep}&at=${index}`} title={row.task}>
              {row.task}
            </Link>
            {row.sample > 0 && <span className="soft"> #{row.sample}</span>}
          </div>
          <div className="cut soft" title={row.cause || row.category}>
            {row.tampered && <b>tampered inputs · </b>}
            {row.cause || row.category}
          </div>
        </div>
      ),
    },
    {
      name: "outcome",
      sort: "outcome",
      width: "108px",
      phone: true,
      cell: (row) => <OutcomeMark outcome={row.outcome} />,
    },
    { name: "official", sort: "official", width: "68px", num: true, phone: true, cell: (row) => percent(row.official) },
    { name: "adjusted", sort: "corrected", width: "70px", num: true, title: "baseline-adjusted score", cell: (row) => percent(row.corrected) },
    {
      name: "checks not passed",
      sort: "passed",
      width: "minmax(120px, 1.5fr)",
      cell: (row) => (
        <div className="two-lines">
          <div>
            {row.checks ? `${whole(row.passed)} of ${whole(row.checks)} passed` : <span className="soft">no checks</span>}
          </div>
          <div className="cut soft mono" style={{ fontSize: 11.5 }} title={row.failed.join(", ")}>
            {row.failed.join(", ")}
          </div>
        </div>
      ),
    },
    { name: "steps", sort: "steps", width: "56px", num: true, cell: (row) => whole(row.steps) },
    { name: "tokens", sort: "tokens", width: "72px", num: true, cell: (row) => count(row.prompt_tokens + row.completion_tokens) },
    { name: "cost", sort: "cost", width: "72px", num: true, cell: (row) => dollars(row.cost_usd) },
    { name: "time", sort: "seconds", width: "84px", num: true, cell: (row) => duration(row.seconds) },
    { name: "finished", sort: "finished", width: "92px", num: true, cell: (row) => <span className="soft">{row.finished.slice(11, 19) || "–"}</span> },
  ];
}
