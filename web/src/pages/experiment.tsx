/** An experiment: curves of its arms with intervals, and its tables. */
import type { Experiment } from "../api";
import { Chart } from "../chart";
import { embedded, useAnswer } from "../data";
import { Blank, Head, Notes, Notice, Section, Shown, StateMark, Table } from "../ui";

export function ExperimentPage({ params }: { params: { id: string } }) {
  const asked = useAnswer<Experiment>(`experiments/${params.id}`, params.id);
  return <Shown asked={asked}>{(experiment) => <Page experiment={experiment} />}</Shown>;
}

function Page({ experiment }: { experiment: Experiment }) {
  const { charts, tables } = experiment;
  return (
    <>
      <Head
        title={experiment.name}
        crumbs={embedded ? [] : [["Sources", "/"]]}
        marks={<StateMark state={experiment.state} />}
        facts={embedded ? experiment.about : [...experiment.about, ["Path", experiment.path]]}
      />
      {experiment.state === "running" && (
        <Notice>
          <b>Running.</b> Curves and tables grow with each cell that ends. This page follows.
        </Notice>
      )}
      <Notes notes={experiment.notes} />
      {!charts.length && !tables.length && (
        <Blank small title="No results yet">
          <p>Curves appear with the first cell that ends.{experiment.state !== "running" && " Run the same command again to resume."}</p>
        </Blank>
      )}
      {charts.map((chart) => (
        <section key={chart.title}>
          <Chart
            title={chart.title}
            lines={chart.lines}
            across={chart.across}
            height={280}
            {...(chart.from === null ? {} : { from: chart.from })}
            {...(chart.to === null ? {} : { to: chart.to })}
          />
          {chart.about && <p className="soft note" style={{ marginTop: 6 }}>{chart.about}</p>}
        </section>
      ))}
      {tables.map((grid) => (
        <Section key={grid.title} title={grid.title} aside={grid.about}>
          <Table
            card
            label={grid.title}
            cols={grid.columns.map((name, n) => ({
              name,
              num: grid.rows.every((row) => /^[-+\d]?[\d.]+( \[.*\])?$|^$/.test(row[n] ?? "")),
              cell: (row: string[]) => (n ? row[n] : <b>{row[n]}</b>),
            }))}
            rows={grid.rows}
          />
        </Section>
      ))}
    </>
  );
}
