/** One attempt at one task: its timeline, checks, pictures, tokens and training sequences. */
import { ActionIcon, Tabs } from "@mantine/core";
import { useEffect, useState, type ReactNode } from "react";
import { Link, useLocation } from "wouter";
import type { Check, Episode, EpisodeLine, Page, PoolEpisode, PoolEpisodeLine } from "../api";
import { embedded, useAnswer, useSource } from "../data";
import { bytes, count, dollars, duration, number, percent, plural, signed, when, whole } from "../format";
import { Icon } from "../icons";
import { useKeys } from "../keys";
import { FILTERS, listQuery } from "../lists";
import { to, useQuery } from "../router";
import { Blank, Facts, Head, Listing, Long, Mark, Notes, Notice, OutcomeMark, Raw, Section, Shown, Table, outcomeName } from "../ui";
import { Sequences } from "./sequences";
import { Timeline } from "./timeline";
import { TokenView } from "./tokens";
import { Replay } from "./replay";

export function EpisodePage({ params }: { params: { id: string; name: string } }) {
  const base = `runs/${params.id}/episodes/${params.name}`;
  const asked = useAnswer<Episode>(base, params.id);
  return <Shown asked={asked}>{(episode) => <RunEpisode key={base} id={params.id} base={base} episode={episode} />}</Shown>;
}

interface Tab {
  name: string;
  label: string;
  body: () => ReactNode;
}

/** Tabs whose choice is in the address. */
function AddressTabs({ tabs }: { tabs: Tab[] }) {
  const [query, change] = useQuery();
  const wanted = query.get("tab") ?? "";
  const shown = tabs.find((tab) => tab.name === wanted) ?? tabs[0];
  if (!shown) return null;
  return (
    <Tabs value={shown.name} onChange={(name) => change({ tab: name === tabs[0]?.name ? "" : (name ?? "") })} keepMounted={false}>
      <div className="scroll">
        <Tabs.List style={{ flexWrap: "nowrap" }}>
          {tabs.map((tab) => (
            <Tabs.Tab key={tab.name} value={tab.name}>
              {tab.label}
            </Tabs.Tab>
          ))}
        </Tabs.List>
      </div>
      <Tabs.Panel value={shown.name} style={{ paddingTop: 16 }}>
        {shown.body()}
      </Tabs.Panel>
    </Tabs>
  );
}

/** Links to the episodes before and after this one in the list that it was opened from. */
function Around({ list, at, link }: { list: string; at: number; link: (item: never, at: number) => string }) {
  const from = Math.max(0, at - 1);
  const asked = useAnswer<Page<never>>(`${list}${list.includes("?") ? "&" : "?"}offset=${from}&limit=3`);
  const [, navigate] = useLocation();
  const items = asked.data?.items ?? [];
  const before = at > 0 ? items[0] : undefined;
  const after = items[at - from + 1];
  const go = (item: never | undefined, index: number) => {
    if (item === undefined) return false;
    navigate(link(item, index));
    return true;
  };
  useKeys({ p: () => go(before, at - 1), n: () => go(after, at + 1) });
  if (!asked.data) return null;
  return (
    <span className="actions">
      <span className="soft">
        {whole(at + 1)} of {whole(asked.data.total)}
      </span>
      <ActionIcon variant="default" size="md" aria-label="Previous episode (p)" disabled={before === undefined} onClick={() => go(before, at - 1)}>
        <Icon name="left" />
      </ActionIcon>
      <ActionIcon variant="default" size="md" aria-label="Next episode (n)" disabled={after === undefined} onClick={() => go(after, at + 1)}>
        <Icon name="right" />
      </ActionIcon>
    </span>
  );
}

function RunEpisode({ id, base, episode }: { id: string; base: string; episode: Episode }) {
  const [query] = useQuery();
  const at = query.get("at");
  const source = useSource(id);
  const keep = listQuery(query);
  const back = new URLSearchParams([...query].filter(([name]) => name === "sort" || (FILTERS as readonly string[]).includes(name)));
  const facts: [string, string][] = [
    ["Official", percent(episode.official)],
    ["Strict", percent(episode.strict)],
    ...(episode.corrected === null ? [] : [["Baseline-adjusted", percent(episode.corrected)] as [string, string]]),
    ["Checks passed", episode.checks ? `${whole(episode.passed)} of ${whole(episode.checks)}` : "–"],
    ["Steps", whole(episode.steps)],
    ["Tool calls", whole(episode.tool_calls)],
    ["Tokens in, out", `${count(episode.prompt_tokens)}, ${count(episode.completion_tokens)}`],
    ...(episode.cost_usd === null ? [] : [["Cost", dollars(episode.cost_usd)] as [string, string]]),
    ["Time", duration(episode.seconds)],
    ["Finished", when(episode.finished)],
    ...(episode.category ? [["Category", episode.category] as [string, string]] : []),
  ];
  const tabs: Tab[] = [
    {
      name: "timeline",
      label: `Timeline${episode.turns ? ` (${whole(episode.turns)})` : ""}`,
      body: () => (
        <Timeline
          base={base}
          live={id}
          rewards={[]}
          tokens={episode.has_tokens}
          aside={<CheckList checks={episode.checks_list} />}
          final={episode.final_message}
          empty={
            episode.outcome === "infra" || episode.outcome === "unsupported"
              ? "This episode has no transcript: it ended before the agent did anything."
              : "No transcript is stored for this episode."
          }
        />
      ),
    },
    { name: "checks", label: "Grading", body: () => <Grading episode={episode} /> },
    ...(episode.pictures.length
      ? [{ name: "replay", label: `Screenshots (${whole(episode.pictures.length)})`, body: () => <Replay base={base} pictures={episode.pictures} /> }]
      : []),
    ...(episode.has_tokens ? [{ name: "tokens", label: "Tokens", body: () => <TokenView base={base} /> }] : []),
    { name: "files", label: "Files", body: () => <Files episode={episode} /> },
  ];
  return (
    <>
      <Head
        title={episode.task}
        crumbs={[
          ...(embedded ? [] : [["Sources", "/"] as [string, string]]),
          [source?.name ?? "Run", to("runs", id) + (back.toString() ? `?${back}` : "")],
        ]}
        marks={
          <>
            <OutcomeMark outcome={episode.outcome} />
            {episode.sample > 0 && <Mark>sample {episode.sample}</Mark>}
            {episode.tampered && (
              <Mark kind="warn" icon="warn">
                tampered inputs
              </Mark>
            )}
            {episode.runs_agent_code && <Mark kind="warn">grader runs agent code</Mark>}
            {episode.judged_by && <Mark>judged by {episode.judged_by}</Mark>}
          </>
        }
        facts={facts}
        actions={
          <>
            {episode.pool && !embedded && <Link href={to("pools", episode.pool.source, "episodes", episode.pool.seq)}>In the pool</Link>}
            {at !== null && (
              <Around
                list={`runs/${id}/episodes${keep}`}
                at={Number(at)}
                link={(item: EpisodeLine, index) => `${to("runs", id, "episodes", item.name)}${keep}&at=${index}`}
              />
            )}
          </>
        }
      />
      <Notes notes={episode.notes} />
      {episode.cause && (
        <Notice kind={episode.outcome === "solved" ? "info" : episode.outcome === "infra" ? "warn" : "error"}>
          <b>{outcomeName(episode.outcome)}</b>
          {episode.fault && ` (${episode.fault})`}: {episode.cause}
        </Notice>
      )}
      {episode.error_log && (
        <details style={{ marginBottom: 12 }}>
          <summary>Error message</summary>
          <Long className="block" text={episode.error_log} cap={6000} lines={60} />
        </details>
      )}
      <AddressTabs tabs={tabs} />
    </>
  );
}

export interface RewardPoint {
  step: number;
  name: string;
  value: number | null;
}

function CheckMark({ score }: { score: number }) {
  if (score >= 1) return <Mark kind="solved" icon="check">passed</Mark>;
  if (score <= 0) return <Mark kind="failed" icon="cross">not passed</Mark>;
  return <Mark kind="warn">{percent(score, 0)}</Mark>;
}

function CheckList({ checks }: { checks: Check[] }) {
  const [, change] = useQuery();
  if (!checks.length) return null;
  const sorted = [...checks].sort((a, b) => a.score - b.score);
  return (
    <div className="card">
      <div className="title">
        <h2>Checks</h2>
        <button className="more" onClick={() => change({ tab: "checks" })}>
          What they saw
        </button>
      </div>
      <ul style={{ display: "grid", gap: 5, fontSize: 13 }}>
        {sorted.slice(0, 12).map((check) => (
          <li key={check.name} style={{ display: "flex", gap: 8, alignItems: "baseline" }}>
            <CheckMark score={check.score} />
            <span className="mono" style={{ minWidth: 0 }}>
              {check.name}
            </span>
          </li>
        ))}
      </ul>
      {sorted.length > 12 && <p className="soft">and {whole(sorted.length - 12)} more</p>}
    </div>
  );
}

function Grading({ episode }: { episode: Episode }) {
  const checks = [...episode.checks_list].sort((a, b) => a.score - b.score);
  return (
    <>
      {checks.length === 0 ? (
        <Blank small title="No checks">
          <p>{episode.outcome === "infra" ? "The episode was not graded, since an infrastructure error ended it." : "The grader gave one score, without named checks."}</p>
        </Blank>
      ) : (
        <Table
          card
          label="Checks"
          most={200}
          cols={[
            { name: "check", cell: (check) => <code>{check.name}</code> },
            { name: "result", cell: (check) => <CheckMark score={check.score} /> },
            { name: "score", num: true, cell: (check) => number(check.score) },
            {
              name: "what it saw",
              grow: true,
              cell: (check) => (check.seen ? <Long className="text mono" text={check.seen} cap={600} lines={6} /> : <span className="soft">The verifier's log does not name it.</span>),
            },
          ]}
          rows={checks}
        />
      )}
      {episode.facts.length > 0 && (
        <Section title="About the grading">
          <Facts rows={episode.facts} />
        </Section>
      )}
      {episode.votes.length > 0 && (
        <Listing
          title="Votes of the judge"
          cols={[
            { name: "criterion", grow: true, cell: (row) => row.criterion },
            { name: "votes", num: true, cell: (row) => row.votes.map((vote) => number(vote)).join("  ") },
            { name: "mean", num: true, cell: (row) => number(row.votes.reduce((a, b) => a + b, 0) / Math.max(1, row.votes.length)) },
          ]}
          rows={episode.votes}
        />
      )}
      <Section title="Verifier log">
        {episode.verifier_log ? <Long className="block" text={episode.verifier_log} cap={8000} lines={80} /> : <p className="soft">The verifier printed nothing, or its log is not stored.</p>}
      </Section>
      {episode.history.length > 1 && (
        <Listing
          title="Attempts"
          cols={[
            { name: "attempt", num: true, cell: (row) => whole(row.attempt) },
            { name: "outcome", cell: (row) => <OutcomeMark outcome={row.outcome} /> },
            { name: "cause", grow: true, cell: (row) => [row.cause, row.fault && `(${row.fault})`].filter(Boolean).join(" ") },
            { name: "time", num: true, cell: (row) => duration(row.seconds) },
            { name: "finished", num: true, cell: (row) => when(row.finished) },
          ]}
          rows={episode.history}
        />
      )}
      <Section title="Time by phase">
        <Facts rows={Object.entries(episode.phases).map(([name, seconds]) => [name, duration(seconds)])} />
      </Section>
    </>
  );
}

function Files({ episode }: { episode: Episode }) {
  return (
    <>
      <Section title="Workspace, as the agent left it" aside={plural(episode.workspace.files.length, "entry", "entries")}>
        {episode.workspace.note && <Notice>{episode.workspace.note}</Notice>}
        {episode.workspace.files.length > 0 && (
          <Table
            card
            label="Workspace"
            most={200}
            cols={[
              { name: "path", grow: true, cell: (file) => <code>{file.path}</code> },
              { name: "kind", cell: (file) => file.kind },
              { name: "size", num: true, cell: (file) => (file.kind === "file" ? bytes(file.size) : "–") },
            ]}
            rows={episode.workspace.files}
          />
        )}
      </Section>
      <Section title="Stored files of the episode">
        {episode.files.length ? (
          <Table
            card
            label="Stored files"
            cols={[
              { name: "name", grow: true, cell: (file) => <code>{file.name}</code> },
              { name: "size", num: true, cell: (file) => bytes(file.size) },
            ]}
            rows={episode.files}
          />
        ) : (
          <p className="soft">Nothing is stored.</p>
        )}
      </Section>
      <Section title="Identity">
        <Facts
          rows={[
            ["Task hash", episode.task_hash],
            ["Seed", episode.seed === null ? "–" : String(episode.seed)],
            ["Episode", episode.name],
          ]}
        />
      </Section>
    </>
  );
}

// ------------------------------------------------------------------------------------------------- of a pool

export function PoolEpisodePage({ params }: { params: { id: string; seq: string } }) {
  const base = `pools/${params.id}/episodes/${params.seq}`;
  const asked = useAnswer<PoolEpisode>(base, params.id);
  return <Shown asked={asked}>{(episode) => <OfPool key={base} id={params.id} base={base} episode={episode} />}</Shown>;
}

function OfPool({ id, base, episode }: { id: string; base: string; episode: PoolEpisode }) {
  const [query] = useQuery();
  const at = query.get("at");
  const source = useSource(id);
  const training = useSource(source?.parent ?? null);
  const [list, setList] = useState("");
  useEffect(() => {
    const kept = new URLSearchParams([...query].filter(([name]) => !["tab", "step", "turn", "at", "by"].includes(name)));
    setList(`pools/${id}/episodes${kept.toString() ? "?" + kept : ""}`);
  }, [id, query]);
  const facts: [string, string][] = [
    ["Reward", number(episode.reward)],
    ["Turns", whole(episode.turns)],
    ["Training sequences", whole(episode.sequences)],
    ["Trained token ids", whole(episode.trained_ids)],
    ["Flawed turns", whole(episode.flawed)],
    ["Channel", episode.channel],
    ["Agent", episode.agent],
    ["Opened", when(episode.opened)],
    ["Closed", episode.closed === null ? "still open" : when(episode.closed)],
  ];
  return (
    <>
      <Head
        title={episode.task || episode.id}
        crumbs={[
          ["Sources", "/"],
          [training ? `Pool of ${training.name}` : (source?.name ?? "Pool"), to("pools", id)],
        ]}
        marks={
          <>
            {episode.outcome && <OutcomeMark outcome={episode.outcome} />}
            {episode.state === "open" && <Mark kind="running">open</Mark>}
            {episode.fate && <Mark kind={episode.fate === "delivered" ? "kept" : "warn"}>{episode.fate}</Mark>}
            {episode.sample > 0 && <Mark>sample {episode.sample}</Mark>}
          </>
        }
        facts={facts}
        actions={
          <>
            {episode.run && <Link href={to("runs", episode.run.source, "episodes", episode.run.name)}>In the run</Link>}
            {at !== null && list && (
              <Around
                list={list}
                at={Number(at)}
                link={(item: PoolEpisodeLine, index) => `${to("pools", id, "episodes", item.seq)}${list.includes("?") ? list.slice(list.indexOf("?")) + "&" : "?"}at=${index}`}
              />
            )}
          </>
        }
      />
      <Notes notes={episode.notes} />
      {episode.cause && <Notice kind={episode.outcome === "solved" ? "info" : "warn"}>{episode.cause}</Notice>}
      <AddressTabs
        tabs={[
          {
            name: "timeline",
            label: `Timeline (${whole(episode.turns)})`,
            body: () => (
              <Timeline
                base={base}
                live={id}
                tokens
                rewards={episode.rewards_by_turn}
                aside={<Group id={id} episode={episode} />}
                final=""
                empty="This episode has no turns yet."
              />
            ),
          },
          { name: "tokens", label: "Tokens", body: () => <TokenView base={base} /> },
          { name: "sequences", label: "Training sequences", body: () => <Sequences base={base} /> },
          ...(episode.pictures.length ? [{ name: "replay", label: "Screenshots", body: () => <Replay base={base} pictures={episode.pictures} /> }] : []),
          {
            name: "about",
            label: "Rewards and curation",
            body: () => (
              <>
                <Section title="Rewards">
                  <Facts rows={Object.entries(episode.rewards).map(([name, value]) => [name, number(value)])} />
                  {Object.keys(episode.penalties).length > 0 && <Facts rows={Object.entries(episode.penalties).map(([name, value]) => [`penalty: ${name}`, number(value)])} />}
                </Section>
                {episode.trained && (
                  <Listing
                    title="Advantages"
                    aside={`as step ${whole(episode.trained.step)} of the training used them`}
                    cols={[
                      {
                        name: "turn",
                        grow: true,
                        cell: (row) => <Link href={`${to("pools", id, "episodes", episode.seq)}?tab=tokens&turn=${row.turn}&by=advantage`}>turn {whole(row.turn)}</Link>,
                      },
                      { name: "mean of its tokens", num: true, cell: (row) => <b>{number(row.mean)}</b> },
                      { name: "least", num: true, cell: (row) => number(row.least) },
                      { name: "most", num: true, cell: (row) => number(row.most) },
                    ]}
                    rows={episode.trained.turns}
                  />
                )}
                <Section title="Curation">
                  <p>{episode.curation_note || "Curation has not decided about this episode."}</p>
                  {episode.tags.length > 0 && (
                    <p className="actions" style={{ marginTop: 8 }}>
                      {episode.tags.map((tag) => (
                        <Mark key={tag}>{tag}</Mark>
                      ))}
                    </p>
                  )}
                </Section>
                <section>
                  <Raw title="All that is stored with the episode" value={episode.meta} />
                </section>
              </>
            ),
          },
        ]}
      />
    </>
  );
}

function Group({ id, episode }: { id: string; episode: PoolEpisode }) {
  const rewards = episode.members.map((member) => member.reward).filter((reward) => reward !== null);
  const mean = rewards.reduce((a, b) => a + b, 0) / Math.max(1, rewards.length);
  return (
    <div className="card">
      <div className="title">
        <h2>Group</h2>
        <span className="soft">{plural(episode.members.length, "episode")}</span>
      </div>
      {episode.trained && (
        <p style={{ marginBottom: 8 }}>
          Trained on in <b>step {whole(episode.trained.step)}</b>
        </p>
      )}
      {episode.advantage && (
        <p style={{ marginBottom: 8 }}>
          {episode.trained ? "By rewards alone" : "Advantage"} <b>{signed(episode.advantage.centred / 100, 3)}</b>
          {episode.advantage.normalized !== null && <span className="soft"> · {number(episode.advantage.normalized)} standard deviations</span>}
          <span className="soft"> · mean reward {number(mean)}</span>
        </p>
      )}
      <ul style={{ display: "grid", gap: 3, fontSize: 13 }}>
        {episode.members.map((member) => (
          <li key={member.seq} style={{ display: "flex", justifyContent: "space-between" }}>
            {member.seq === episode.seq ? <b>sample {member.sample}, this one</b> : <Link href={to("pools", id, "episodes", member.seq)}>sample {member.sample}</Link>}
            <span>{member.reward === null ? <span className="soft">no reward</span> : number(member.reward)}</span>
          </li>
        ))}
      </ul>
    </div>
  );
}

