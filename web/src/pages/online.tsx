/** Versions of an online service, with the results of the gate. */
import { Button } from "@mantine/core";
import { useEffect, useRef, useState } from "react";
import type { GateResult, Online, Version } from "../api";
import { Failed, post, useAnswer } from "../data";
import { ago, number, plural, when, whole } from "../format";
import { Blank, Head, Listing, Mark, Notes, Notice, Section, Shown, Table, Tile } from "../ui";

export function OnlinePage({ params }: { params: { id: string } }) {
  const asked = useAnswer<Online>(`online/${params.id}`, params.id);
  return <Shown asked={asked}>{(online) => <Page online={online} again={asked.again} />}</Shown>;
}

interface Wish {
  kind: "promote" | "rollback";
  version: number;
}

function Page({ online, again }: { online: Online; again: () => void }) {
  const [wish, ask] = useState<Wish | null>(null);
  const serving = online.versions.find((version) => version.answers);
  return (
    <>
      <Head
        title={online.name}
        crumbs={[["Sources", "/"]]}
        marks={
          online.base_url ? (
            <Mark kind="running">serving</Mark>
          ) : (
            <Mark>the service does not run</Mark>
          )
        }
        facts={[
          ["Answers", online.serving ? `version ${online.serving}` : "the start model"],
          ["Versions", whole(online.versions.length)],
          ...(online.base_url ? [["Address", online.base_url] as [string, string]] : []),
          ["Path", online.path],
        ]}
      />
      <Notes notes={online.notes} />
      <div className="tiles">
        <Tile main label="Version that answers" value={whole(online.serving)} note={serving ? `made ${ago(serving.made)} from ${plural(serving.sessions, "session")}` : "no version has been promoted"} />
        {online.watch && <Tile label={`Since the promotion of version ${online.watch.version}`} value={online.watch.verdict} note={online.watch.reason} />}
        {online.comparison && <Tile label={`Gate, version ${online.comparison.version}`} value={online.comparison.verdict} note="compared below" />}
      </div>
      {online.comparison && (
        <Section title={`Comparison of the gate, version ${online.comparison.version}`}>
          <Figures result={online.comparison} />
          {online.comparison.figures.length > 0 && online.comparison.reasons.map((reason) => <p className="soft" key={reason}>{reason}</p>)}
        </Section>
      )}
      <Section title="Versions" aside={online.writable ? "" : "Read only. Start the viewer with --write to promote and roll back here."}>
        {online.versions.length === 0 ? (
          <Blank small title="No version yet">
            <p>A version is made once enough sessions have ended.</p>
          </Blank>
        ) : (
          <Table<Version>
            card
            label="Versions"
            cols={[
              { name: "version", num: true, cell: (version) => <b>{version.number}</b> },
              {
                name: "state",
                cell: (version) => (
                  <>
                    <Mark kind={version.state === "withdrawn" || version.state === "erased" ? "warn" : version.state}>{version.state}</Mark> {version.answers && <Mark kind="running">answers</Mark>}
                  </>
                ),
              },
              { name: "from", num: true, cell: (version) => (version.parent === null ? "start" : version.parent) },
              { name: "sessions", num: true, cell: (version) => whole(version.sessions) },
              { name: "made", cell: (version) => <time title={when(version.made)}>{ago(version.made)}</time> },
              { name: "gate", grow: true, cell: (version) => <Gate results={version.gate} /> },
              {
                name: "",
                cell: (version) =>
                  online.writable && (
                    <span className="actions" style={{ flexWrap: "nowrap" }}>
                      {version.can_promote && (
                        <Button size="compact-sm" onClick={() => ask({ kind: "promote", version: version.number })}>
                          Promote
                        </Button>
                      )}
                      {version.can_roll_back_to && (
                        <Button size="compact-sm" variant="default" onClick={() => ask({ kind: "rollback", version: version.number })}>
                          Roll back to it
                        </Button>
                      )}
                    </span>
                  ),
              },
            ]}
            rows={[...online.versions].sort((a, b) => b.number - a.number)}
          />
        )}
      </Section>
      {online.events.length > 0 && (
        <Listing
          title="History"
          most={20}
          cols={[
            { name: "when", cell: (event) => <time>{when(event.at)}</time> },
            { name: "what", cell: (event) => <Mark kind={event.kind === "promoted" ? "promoted" : "warn"}>{event.kind === "promoted" ? "promoted" : "rolled back"}</Mark> },
            { name: "version", num: true, cell: (event) => event.version },
            { name: "before", num: true, cell: (event) => event.before },
            { name: "reason", grow: true, cell: (event) => event.reason },
          ]}
          rows={[...online.events].reverse()}
        />
      )}
      <Confirm id={online.id} serving={online.serving} wish={wish} close={() => ask(null)} done={again} />
    </>
  );
}

function Gate({ results }: { results: GateResult[] }) {
  if (!results.length) return <span className="soft">not compared yet</span>;
  return (
    <div style={{ display: "grid", gap: 6, minWidth: 220 }}>
      {results.map((result, at) => (
        <details key={at}>
          <summary>
            <b>{result.verdict}</b> <span className="soft">{result.reasons.join("; ")}</span>
          </summary>
          <Figures result={result} />
        </details>
      ))}
    </div>
  );
}

function Figures({ result }: { result: GateResult }) {
  if (!result.figures.length) return <p className="soft">{result.reasons.join("; ") || "Nothing was measured yet."}</p>;
  return (
    <Table
      card
      label={`Gate of version ${result.version}`}
      cols={[
        { name: "criterion", grow: true, cell: (figure) => figure.name },
        { name: "n", num: true, cell: (figure) => whole(figure.n) },
        { name: "value", num: true, cell: (figure) => <b>{number(figure.value)}</b> },
        { name: "interval", num: true, cell: (figure) => (figure.low === null || figure.high === null ? "–" : `${number(figure.low)} – ${number(figure.high)}`) },
        { name: "needed", num: true, title: "What the lower end of the interval must be at least", cell: (figure) => number(figure.needed) },
      ]}
      rows={result.figures}
    />
  );
}

function Confirm({ id, serving, wish, close, done }: { id: string; serving: number; wish: Wish | null; close: () => void; done: () => void }) {
  const dialog = useRef<HTMLDialogElement>(null);
  const [failed, fail] = useState("");
  const [busy, work] = useState(false);
  useEffect(() => {
    fail("");
    if (wish && !dialog.current?.open) dialog.current?.showModal();
    if (!wish) dialog.current?.close();
  }, [wish]);
  const act = async () => {
    if (!wish) return;
    work(true);
    try {
      await post(`online/${id}/${wish.kind}`, { version: wish.version });
      done();
      close();
    } catch (error) {
      fail(error instanceof Failed ? error.message : String(error));
    } finally {
      work(false);
    }
  };
  return (
    <dialog ref={dialog} onClose={close} aria-labelledby="confirm-title">
      <h2 id="confirm-title">
        {wish?.kind === "promote" ? "Promote" : "Roll back to"} version {wish?.version}?
      </h2>
      <p>
        Version {wish?.version} will answer all new sessions in place of version {serving}. {wish?.kind === "promote" ? "You can roll back later." : "The versions after it are not erased."}
      </p>
      {failed && (
        <div style={{ marginTop: 12 }} role="alert">
          <Notice kind="error">{failed}</Notice>
        </div>
      )}
      <div className="actions" style={{ marginTop: 16, justifyContent: "flex-end" }}>
        <Button size="xs" variant="default" onClick={close}>
          Cancel
        </Button>
        <Button size="xs" onClick={() => void act()} disabled={busy}>
          {wish?.kind === "promote" ? "Promote" : "Roll back"}
        </Button>
      </div>
    </dialog>
  );
}
