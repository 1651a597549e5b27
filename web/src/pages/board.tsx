/** The runs over one task set, ranked. */
import { SegmentedControl } from "@mantine/core";
import { Link } from "wouter";
import type { Board, BoardEntry } from "../api";
import { useAnswer } from "../data";
import { count, dollars, percent, plural, whole } from "../format";
import { to, useQuery } from "../router";
import { Blank, EstimateBar, Head, Listing, Mark, Notes, Shown, interval } from "../ui";

const LABELS = { strict: "Strict", corrected: "Baseline-adjusted", official: "Official" } as const;

export function BoardPage({ params }: { params: { id: string } }) {
  const [query, change] = useQuery();
  const by = query.get("by") ?? "";
  const asked = useAnswer<Board>(`boards/${params.id}${by ? "?by=" + encodeURIComponent(by) : ""}`, params.id);
  return (
    <Shown asked={asked}>
      {(board) => (
        <>
          <Head
            title={board.task_set}
            crumbs={[["Sources", "/"]]}
            facts={[
              ["Task set hash", board.task_set_hash.slice(0, 12)],
              ["Entries", whole(board.entries.length)],
            ]}
            actions={
              <SegmentedControl
                size="xs"
                aria-label="Rank by"
                value={board.by}
                onChange={(value) => change({ by: value })}
                data={Object.entries(LABELS).map(([value, label]) => ({ value, label }))}
              />
            }
          />
          <Notes notes={board.notes} />
          {board.entries.length === 0 ? (
            <Blank small title="No entries">
              <p>A run over this task set becomes an entry once it is complete.</p>
            </Blank>
          ) : (
            <Entries board={board} />
          )}
        </>
      )}
    </Shown>
  );
}

function Entries({ board }: { board: Board }) {
  const score = (entry: BoardEntry) => entry[board.by];
  return (
    <Listing<BoardEntry>
      title={`Ranked by ${LABELS[board.by].toLowerCase()} score`}
      aside="over the tasks whose grader is code that only reads files; 95% intervals"
      most={200}
      cols={[
        { name: "rank", num: true, cell: (entry) => (entry.rank === null ? <span className="soft" title="Not complete, or flagged">–</span> : <b>{entry.rank}</b>) },
        {
          name: "entry",
          grow: true,
          cell: (entry) => (
            <div style={{ minWidth: 180 }}>
              <Link href={to("runs", entry.run)}>
                <b>{entry.model || entry.name}</b>
              </Link>
              <div className="soft">{[`${entry.agent} ${entry.agent_version}`.trim(), entry.folder].filter(Boolean).join(" · ")}</div>
            </div>
          ),
        },
        { name: LABELS[board.by].toLowerCase(), num: true, cell: (entry) => <b>{percent(score(entry)?.value)}</b> },
        {
          name: "interval",
          cell: (entry) => {
            const estimate = score(entry);
            return (
              estimate && (
                <div style={{ width: 150 }}>
                  <EstimateBar estimate={estimate} />
                  <span className="soft">{interval(estimate)}</span>
                </div>
              )
            );
          },
        },
        ...(["strict", "official", "corrected"] as const)
          .filter((name) => name !== board.by)
          .map((name) => ({ name: LABELS[name].toLowerCase(), num: true, cell: (entry: BoardEntry) => percent(entry[name]?.value) })),
        { name: "episodes", num: true, cell: (entry) => `${whole(entry.episodes)} / ${whole(entry.planned)}` },
        { name: "infra", num: true, cell: (entry) => percent(entry.infra_rate) },
        { name: "cost per solved", num: true, cell: (entry) => dollars(entry.cost_per_solved) },
        { name: "tokens per solved", num: true, cell: (entry) => count(entry.tokens_per_solved) },
        {
          name: "",
          cell: (entry) => (
            <div style={{ display: "grid", gap: 3, justifyItems: "start", minWidth: 130 }}>
              {entry.verified && (
                <Mark kind="kept" icon="check">
                  {entry.verified}
                </Mark>
              )}
              {entry.flags.map((flag) => (
                <Mark key={flag} kind="warn" icon="warn">
                  {flag}
                </Mark>
              ))}
              {entry.excluded.length > 0 && (
                <span className="soft" title={entry.excluded.map((group) => `${group.name}: strict ${percent(group.strict?.value)}, ${plural(group.episodes, "episode")}`).join("; ")}>
                  {plural(entry.excluded.length, "group")} not in the score
                </span>
              )}
            </div>
          ),
        },
      ]}
      rows={board.entries}
    />
  );
}
