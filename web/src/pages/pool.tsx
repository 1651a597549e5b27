/** A pool: channels, groups, versions, curation, flaws, and its episodes. */
import { Link } from "wouter";
import { useRef, useMemo } from "react";
import type { Channel, Pool, PoolEpisodeLine, PoolGroup } from "../api";
import { query as asQuery, useAnswer, usePaged, useSource } from "../data";
import { ago, count, number, plural, whole } from "../format";
import { useKeys } from "../keys";
import { Clear, Exports, Select } from "../lists";
import { to, useQuery } from "../router";
import { Bars, Blank, Counts, Facts, FilterField, Head, Mark, Notes, OutcomeMark, Section, Shown } from "../ui";
import { Found, VirtualTable, type VCol } from "../vtable";

export function PoolPage({ params }: { params: { id: string } }) {
  const asked = useAnswer<Pool>(`pools/${params.id}`, params.id);
  return <Shown asked={asked}>{(pool) => <Page pool={pool} />}</Shown>;
}

const total = (counts: Record<string, number>) => Object.values(counts).reduce((a, b) => a + b, 0);
const entries = (counts: Record<string, number>) => Object.entries(counts).sort((a, b) => b[1] - a[1]);

function Page({ pool }: { pool: Pool }) {
  const tokens = pool.versions.reduce((sum, version) => sum + version.tokens, 0);
  const training = useSource(pool.training);
  const most = Math.max(1, ...pool.versions.map((version) => version.turns));
  const [query, change] = useQuery();
  const view = query.get("list") === "groups" ? "groups" : "episodes";
  return (
    <>
      <Head
        title={training ? `Pool of ${training.name}` : pool.name}
        crumbs={[["Sources", "/"]]}
        actions={pool.training && <Link href={to("training", pool.training)}>Training run</Link>}
        facts={[
          ["File", pool.path],
          ["Channels", whole(pool.channels.length)],
          ["Episodes", whole(pool.channels.reduce((sum, channel) => sum + total(channel.episodes), 0))],
          ["Turns", whole(pool.channels.reduce((sum, channel) => sum + channel.turns, 0))],
          ["Sampled tokens", count(tokens)],
          ["Images", whole(pool.images)],
          ["Tool sets", whole(pool.tools)],
          ["Batches", Object.entries(pool.batches).map(([state, n]) => `${whole(n)} ${state}`).join(", ") || "none"],
          ["Changed", ago(pool.changed)],
        ]}
      />
      <Notes notes={pool.notes} />
      {pool.channels.length === 0 && (
        <Blank small title="The pool is empty">
          <p>Episodes appear once a collector writes them.</p>
        </Blank>
      )}
      {pool.channels.map((channel) => (
        <ChannelCard key={channel.name} channel={channel} />
      ))}
      {pool.versions.length > 0 && (
        <Section title="Policy versions" aside="turns that each version sampled">
          <div className="card">
            <Bars
              most={10}
              rows={[...pool.versions]
                .sort((a, b) => (b.version ?? -1) - (a.version ?? -1))
                .map((version) => ({
                  key: String(version.version),
                  name: version.version === null ? "not recorded" : `version ${version.version}`,
                  share: version.turns / most,
                  text: `${whole(version.turns)} turns · ${count(version.tokens)} tokens`,
                }))}
            />
          </div>
        </Section>
      )}
      {pool.channels.length > 0 && (
        <section aria-label="Episodes and groups">
          <div className="title">
            <h2>{view === "groups" ? "Groups" : "Episodes"}</h2>
            <button className="more" onClick={() => change({ list: view === "groups" ? "" : "groups", sort: "", state: "", fate: "", outcome: "" })}>
              {view === "groups" ? "Show episodes" : "Show groups"}
            </button>
          </div>
          {view === "groups" ? <Groups pool={pool} /> : <Episodes pool={pool} />}
        </section>
      )}
    </>
  );
}

function ChannelCard({ channel }: { channel: Channel }) {
  const flawed = entries(channel.flaws);
  return (
    <Section title={`Channel ${channel.name}`} aside={`newest ${ago(channel.newest)}`}>
      <div className="card">
        <Facts
          rows={[
            ["Turns", whole(channel.turns)],
            ["Flawed turns", `${whole(channel.flawed_turns)}`],
            ["Training sequences", whole(channel.samples)],
            ["Trained ids", count(channel.trained_ids)],
            ["Sequences per episode", number(channel.samples_per_episode)],
            ["Curation", `${whole(channel.curation.kept)} kept, ${whole(channel.curation.left_out)} left out, ${whole(channel.curation.undecided)} undecided`],
          ]}
        />
        <div className="two">
          <div>
            <h3>Episodes</h3>
            <Counts rows={entries(channel.episodes)} />
          </div>
          {total(channel.groups) > 0 && (
            <div>
              <h3>Groups</h3>
              <Counts rows={entries(channel.groups)} />
            </div>
          )}
          {total(channel.fates) > 0 && (
            <div>
              <h3>What became of the episodes</h3>
              <Counts rows={entries(channel.fates)} />
            </div>
          )}
          {Object.keys(channel.dropped).length > 0 && (
            <div>
              <h3>Groups that were dropped</h3>
              <Counts rows={entries(channel.dropped)} />
            </div>
          )}
          {flawed.length > 0 && (
            <div>
              <h3>Turns that are not trained on, by flaw</h3>
              <Bars colour="var(--c1)" most={6} rows={flawed.map(([name, n]) => ({ key: name, name, share: n / Math.max(1, channel.turns), text: whole(n) }))} />
            </div>
          )}
        </div>
      </div>
    </Section>
  );
}

function useNames(pool: Pool, of: (channel: Channel) => Record<string, number>): [string, string][] {
  return useMemo(() => [...new Set(pool.channels.flatMap((channel) => Object.keys(of(channel))))].sort().map((name) => [name, name]), [pool, of]);
}

const fatesOf = (channel: Channel) => channel.fates;
const outcomesOf = (channel: Channel) => channel.episodes;
const statesOf = (channel: Channel) => channel.groups;

function Episodes({ pool }: { pool: Pool }) {
  const [query, change] = useQuery();
  const field = useRef<HTMLInputElement>(null);
  useKeys({ "/": () => field.current?.focus() });
  const names = ["channel", "fate", "outcome", "group", "q"];
  const keep = asQuery(Object.fromEntries(names.map((name) => [name, query.get(name)])));
  const address = `pools/${pool.id}/episodes${keep}`;
  const list = usePaged<PoolEpisodeLine>(address, pool.id);
  const fates = useNames(pool, fatesOf);
  const outcomes = useNames(pool, outcomesOf);
  const set = names.some((name) => query.get(name));
  const cols = useMemo(() => columns(pool.id, keep), [pool.id, keep]);
  const clear = <Clear names={names} />;
  return (
    <>
      <div className="filters">
        <FilterField field={field} label="Filter by task" placeholder="Task" value={query.get("q") ?? ""} change={(q) => change({ q })} />
        {pool.channels.length > 1 && <Select label="Channel" value={query.get("channel")} onChange={(channel) => change({ channel })} options={pool.channels.map(({ name }) => [name, name])} />}
        <Select label="Outcome" value={query.get("outcome")} onChange={(outcome) => change({ outcome })} options={outcomes} />
        <Select label="Fate" value={query.get("fate")} onChange={(fate) => change({ fate })} options={fates} />
        {query.get("group") && <Mark>group {query.get("group")}</Mark>}
        {set && clear}
        <span className="end actions">
          <Found list={list} one="episode" />
          <Exports address={address} name={pool.name} />
        </span>
      </div>
      <VirtualTable label="Episodes of the pool" list={list} cols={cols} sort="" onSort={() => undefined} empty={<Blank small title="No episode matches these filters">{clear}</Blank>} />
    </>
  );
}

function columns(id: string, keep: string): VCol<PoolEpisodeLine>[] {
  return [
    { name: "seq", width: "64px", num: true, cell: (row) => <span className="soft">{row.seq}</span> },
    {
      name: "task",
      width: "minmax(96px, 2fr)",
      phone: true,
      cell: (row, index) => (
        <div className="two-lines">
          <div className="cut">
            <Link className="open" href={`${to("pools", id, "episodes", row.seq)}${keep ? keep + "&" : "?"}at=${index}`} title={row.task}>
              {row.task || row.id}
            </Link>
          </div>
          <div className="cut soft">
            sample {row.sample} · {row.channel}
          </div>
        </div>
      ),
    },
    { name: "outcome", width: "112px", phone: true, cell: (row) => (row.state === "open" ? <Mark kind="running">open</Mark> : <OutcomeMark outcome={row.outcome} />) },
    { name: "reward", width: "64px", num: true, phone: true, cell: (row) => number(row.reward) },
    { name: "turns", width: "56px", num: true, cell: (row) => whole(row.turns) },
    { name: "flawed", width: "56px", num: true, cell: (row) => whole(row.flawed) },
    { name: "sequences", width: "76px", num: true, cell: (row) => whole(row.sequences) },
    { name: "trained ids", width: "80px", num: true, cell: (row) => count(row.trained_ids) },
    { name: "fate", width: "minmax(90px, 1fr)", cell: (row) => <span title={row.cause}>{row.fate || "–"}</span> },
    { name: "opened", width: "110px", num: true, cell: (row) => <span className="soft">{ago(row.opened)}</span> },
  ];
}

function Groups({ pool }: { pool: Pool }) {
  const [query, change] = useQuery();
  const keep = asQuery({ channel: query.get("channel"), state: query.get("state") });
  const list = usePaged<PoolGroup>(`pools/${pool.id}/groups${keep}`, pool.id);
  const states = useNames(pool, statesOf);
  const cols = useMemo(() => groupColumns(pool.id), [pool.id]);
  return (
    <>
      <div className="filters">
        {pool.channels.length > 1 && <Select label="Channel" value={query.get("channel")} onChange={(channel) => change({ channel })} options={pool.channels.map(({ name }) => [name, name])} />}
        <Select label="State" value={query.get("state")} onChange={(state) => change({ state })} options={states} />
        <span className="end">
          <Found list={list} one="group" />
        </span>
      </div>
      <VirtualTable label="Groups" list={list} cols={cols} sort="" onSort={() => undefined} empty={<Blank small title="No groups">{plural(0, "group")} match.</Blank>} />
    </>
  );
}

function groupColumns(id: string): VCol<PoolGroup>[] {
  return [
    {
      name: "task",
      width: "minmax(96px, 2fr)",
      phone: true,
      cell: (row) => (
        <div className="two-lines">
          <div className="cut">
            <Link className="open" href={`${to("pools", id)}?group=${encodeURIComponent(row.id)}`} title={row.task}>
              {row.task || row.id}
            </Link>
          </div>
          <div className="cut soft">{row.channel}</div>
        </div>
      ),
    },
    { name: "state", width: "100px", phone: true, cell: (row) => <Mark kind={row.state === "consumed" ? "kept" : row.state === "dropped" ? "warn" : ""}>{row.state}</Mark> },
    { name: "closed", width: "80px", num: true, cell: (row) => `${whole(row.closed)} / ${whole(row.size)}` },
    { name: "infra", width: "56px", num: true, cell: (row) => whole(row.infra) },
    {
      name: "rewards",
      width: "minmax(96px, 2fr)",
      cell: (row) => <span className="mono">{row.rewards.map((reward) => (reward === null ? "·" : number(reward, 2))).join(" ")}</span>,
    },
    { name: "reason", width: "minmax(90px, 1fr)", cell: (row) => <span title={row.reason}>{row.reason || "–"}</span> },
    { name: "opened", width: "110px", num: true, cell: (row) => <span className="soft">{ago(row.opened)}</span> },
  ];
}
