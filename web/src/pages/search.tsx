/** Full-text search over the transcripts. */
import { TextInput } from "@mantine/core";
import { useEffect, useRef, useState } from "react";
import { Link } from "wouter";
import type { Page, SearchHit, Sources } from "../api";
import { query as asQuery, useAnswer } from "../data";
import { plural, whole } from "../format";
import { Icon } from "../icons";
import { useKeys } from "../keys";
import { Select } from "../lists";
import { to, useQuery } from "../router";
import { Blank, Head, Notice, OutcomeMark, Shown } from "../ui";

const SIZE = 50;

export function SearchPage() {
  const [query, change] = useQuery();
  const q = query.get("q") ?? "";
  const source = query.get("source") ?? "";
  const offset = Number(query.get("offset") ?? 0) || 0;
  const [text, set] = useState(q);
  const field = useRef<HTMLInputElement>(null);
  const sources = useAnswer<Sources>("sources", "sources");
  const asked = useAnswer<Page<SearchHit>>(q ? "search" + asQuery({ q, source, offset, limit: SIZE }) : null);
  useKeys({ "/": () => field.current?.focus(), j: () => step(1), k: () => step(-1) });
  useEffect(() => field.current?.focus(), []);
  useEffect(() => set(q), [q]);
  const runs = (sources.data?.sources ?? []).filter((each) => each.kind === "run");
  const [done, total] = runs.reduce(([a, b], run) => [a + (run.indexed?.done ?? 0), b + (run.indexed?.total ?? 0)], [0, 0]);
  return (
    <>
      <Head title="Search" crumbs={[["Sources", "/"]]} />
      <form
        className="filters"
        role="search"
        onSubmit={(event) => {
          event.preventDefault();
          change({ q: text, offset: "" }, { push: true });
        }}
      >
        <TextInput
          ref={field}
          size="sm"
          className="grow"
          style={{ maxWidth: 560 }}
          type="search"
          aria-label="Search the transcripts"
          placeholder="Words of a message, a command, a result"
          leftSection={<Icon name="search" />}
          value={text}
          onChange={(event) => set(event.currentTarget.value)}
        />
        <Select label="Run" value={source} onChange={(value) => change({ source: value, offset: "" })} options={runs.map((run) => [run.id, run.name])} />
        {q && asked.data && (
          <span className="end soft" role="status">
            {plural(asked.data.total, "hit")}
          </span>
        )}
      </form>
      {done < total && (
        <Notice>
          The search covers {whole(done)} of {plural(total, "transcript")} so far. It is still reading the others.
        </Notice>
      )}
      {!q ? (
        <Blank icon="search" title="Search all transcripts">
          <p>All words must be in one step. Put a phrase in quotes: "permission denied".</p>
        </Blank>
      ) : (
        <Shown asked={asked}>
          {(page) =>
            page.items.length === 0 ? (
              <Blank small icon="search" title="Nothing was found">
                <p>{page.note || "Try fewer words, or another run."}</p>
              </Blank>
            ) : (
              <>
                {page.note && <Notice>{page.note}</Notice>}
                <ul className="card flush hits">
                  {page.items.map((hit, at) => (
                    <li key={at}>
                      <div style={{ display: "flex", flexWrap: "wrap", gap: "2px 10px", alignItems: "center" }}>
                        <Link className="hit" href={`${to("runs", hit.source, "episodes", hit.episode)}?step=${hit.step}`}>
                          <b>{hit.task}</b>
                        </Link>
                        <OutcomeMark outcome={hit.outcome} />
                        <span className="soft">
                          {hit.run}, step {hit.step}
                        </span>
                      </div>
                      <div className="text mono" style={{ marginTop: 4 }}>
                        {hit.parts.map(([part, found], n) => (found ? <mark key={n}>{part}</mark> : <span key={n}>{part}</span>))}
                      </div>
                    </li>
                  ))}
                </ul>
                <p className="filters" style={{ marginTop: 10 }}>
                  {offset > 0 && (
                    <button className="more" onClick={() => change({ offset: String(Math.max(0, offset - SIZE)) }, { push: true })}>
                      Earlier hits
                    </button>
                  )}
                  <span className="soft">
                    {whole(offset + 1)} to {whole(offset + page.items.length)} of {whole(page.total)}
                  </span>
                  {offset + page.items.length < page.total && (
                    <button className="more" onClick={() => change({ offset: String(offset + SIZE) }, { push: true })}>
                      More hits
                    </button>
                  )}
                </p>
              </>
            )
          }
        </Shown>
      )}
    </>
  );
}

function step(by: number): boolean {
  const links = [...document.querySelectorAll<HTMLElement>(".hit")];
  const here = links.indexOf(document.activeElement as HTMLElement);
  const next = links[here < 0 ? (by > 0 ? 0 : links.length - 1) : here + by];
  next?.focus();
  return Boolean(next);
}
