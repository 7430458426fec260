// Package lockprom has Prometheus metrics of locks: how long callers wait and
// hold, and what goes wrong.
//
//	locks := lockprom.New()
//	connector, err := mysqllock.NewConnector(cfg, mysqllock.Config{Observer: locks})
//	…
//	db := sql.OpenDB(connector)
//	stats, err := lockprom.NewStatsCollector(db)
//	…
//	registry.MustRegister(locks, stats)
//
// An application with several databases registers those of each with a label of
// its own: prometheus.WrapRegistererWith(prometheus.Labels{"db": "shop"}, registry).
// The rules for alerts keep a label of that name.
//
// Keys are never labels: there are too many of them. [NewWithClasses] has classes of keys.
//
//	mysqllock_wait_seconds        histogram  from asking to the answer, round trips included    strategy, outcome: acquired, refused
//	mysqllock_hold_seconds        histogram  from the grant until giving back begins, or loss   strategy, outcome: released, lost
//	mysqllock_refused_total       counter    locks that were not granted                        strategy, reason
//	mysqllock_lost_total          counter    locks that were lost                               strategy, reason
//	mysqllock_long_holds_total    counter    holds longer than mysqllock.Config.LongHold        strategy
//	mysqllock_active_long_holds   gauge      of these, the ones that last now                   strategy
//	mysqllock_conflicts_total     counter    commits that found another version
//
// and with [NewWithClasses], where an event with keys of several classes counts in each:
//
//	mysqllock_class_wait_seconds   histogram  from asking to the answer                         class, outcome: acquired, refused
//	mysqllock_class_lost_total     counter    locks that were lost                              class
//
// Reasons are locked (and the caller would not wait), waited (in vain, as long as
// allowed), exhausted (no connection to take it on: ErrExhausted), canceled, deadlock,
// conflict, stale_snapshot, unsafe, no_end, closed, connection (the server has not answered:
// ErrNoAnswer; or the connection is gone), lost and other.
//
// How long processes stand by for a leadership (package leader) is not in the histograms of
// waits: it says nothing of delays.
package lockprom

import (
	"context"
	"errors"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/internal/hint"
	"github.com/mysqllock/mysqllock/telemetry/internal/classes"
	"github.com/mysqllock/mysqllock/telemetry/internal/reason"
)

// Observer counts what it is told of locks. It is a [mysqllock.Observer] for one
// or several handles, and a [prometheus.Collector] of what it has counted. Make it
// with [New]. It is safe for concurrent use.
type Observer struct {
	wait, hold    *prometheus.HistogramVec
	refused, lost *prometheus.CounterVec
	longHolds     *prometheus.CounterVec
	longNow       *prometheus.GaugeVec
	conflicts     prometheus.Counter

	classes   *classes.Classes // nil without; then the two below are, too
	classWait *prometheus.HistogramVec
	classLost *prometheus.CounterVec
}

var (
	_ mysqllock.Observer   = (*Observer)(nil)
	_ prometheus.Collector = (*Observer)(nil)
)

const strategy, outcome, why = "strategy", "outcome", "reason"

// New returns an Observer that has counted nothing.
func New() *Observer {
	// Not native ones as well: a Prometheus that scrapes those keeps no others, and
	// queries of _bucket, which are those of the dashboard, find nothing.
	histogram := func(name, help string, buckets ...float64) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets}, []string{strategy, outcome})
	}
	counter := func(name, help string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{strategy, why})
	}
	o := &Observer{
		wait: histogram("mysqllock_wait_seconds", "From asking for a lock to the answer.",
			0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
		hold: histogram("mysqllock_hold_seconds", "From the grant of a lock until giving back began, or until it was lost.",
			0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5, 10, 60, 600, 3600),
		refused: counter("mysqllock_refused_total", "Locks that were not granted."),
		lost:    counter("mysqllock_lost_total", "Locks that were lost while they were held."),
		longHolds: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "mysqllock_long_holds_total",
			Help: "Locks that were held for longer than Config.LongHold, counted while they are.",
		}, []string{strategy}),
		longNow: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "mysqllock_active_long_holds",
			Help: "Locks that are held now, for longer than Config.LongHold.",
		}, []string{strategy}),
		conflicts: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "mysqllock_conflicts_total",
			Help: "Commits that found another version of a key kept optimistically.",
		}),
	}
	// What has never happened is 0, so that the first time is an increase.
	for _, s := range []string{hint.StrategyRow, hint.StrategyLease, hint.StrategyAdvisory, hint.StrategyOptimistic} {
		for _, r := range []string{"locked", "waited", "exhausted", "canceled", "deadlock", "connection"} {
			o.refused.WithLabelValues(s, r)
		}
		for _, r := range []string{"connection", "deadlock", "lost"} {
			o.lost.WithLabelValues(s, r)
		}
		if s != hint.StrategyOptimistic {
			o.longHolds.WithLabelValues(s)
			o.longNow.WithLabelValues(s)
		}
	}
	return o
}

// NewWithClasses is New with metrics by the class of keys, which class returns; inspect.Classes
// makes it of patterns. It is called for each key of each event, by several goroutines. Of
// more than 100 classes the rest, and "", are "other".
func NewWithClasses(class func(key string) string) *Observer {
	o := New()
	o.classes = classes.New(class)
	o.classWait = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name: "mysqllock_class_wait_seconds", Help: "From asking for a lock to the answer, by the class of its key.",
		Buckets: []float64{0.01, 0.1, 1, 10, 60},
	}, []string{"class", outcome})
	o.classLost = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "mysqllock_class_lost_total", Help: "Locks that were lost while they were held, by the class of their key.",
	}, []string{"class"})
	return o
}

// observeClasses counts by the classes of the keys.
func (o *Observer) observeClasses(e mysqllock.Event) {
	for _, class := range o.classes.Of(e.Keys) {
		lost := o.classLost.WithLabelValues(class) // there from the first grant on
		switch {
		case e.Kind == mysqllock.Lost:
			lost.Inc()
		case e.Leadership:
		case e.Kind == mysqllock.Acquired:
			o.classWait.WithLabelValues(class, "acquired").Observe(e.Duration.Seconds())
		case e.Kind == mysqllock.Refused:
			o.classWait.WithLabelValues(class, "refused").Observe(e.Duration.Seconds())
		}
	}
}

// Observe implements [mysqllock.Observer].
func (o *Observer) Observe(_ context.Context, e mysqllock.Event) {
	o.observeClasses(e)
	if e.Long && e.Kind != mysqllock.LongHold {
		o.longNow.WithLabelValues(e.Strategy).Dec()
	}
	switch e.Kind {
	case mysqllock.Acquired:
		o.observeWait(e, "acquired")
	case mysqllock.Refused:
		o.observeWait(e, "refused")
		o.refused.WithLabelValues(e.Strategy, reason.Of(e.Err)).Inc()
	case mysqllock.Released:
		o.hold.WithLabelValues(e.Strategy, "released").Observe(e.Held.Seconds())
		if errors.Is(e.Err, mysqllock.ErrConflict) {
			o.conflicts.Inc()
		}
	case mysqllock.LongHold:
		o.longHolds.WithLabelValues(e.Strategy).Inc()
		o.longNow.WithLabelValues(e.Strategy).Inc()
	case mysqllock.Lost:
		o.hold.WithLabelValues(e.Strategy, "lost").Observe(e.Held.Seconds())
		o.lost.WithLabelValues(e.Strategy, reason.Of(e.Err)).Inc()
	}
}

func (o *Observer) observeWait(e mysqllock.Event, outcome string) {
	if !e.Leadership {
		o.wait.WithLabelValues(e.Strategy, outcome).Observe(e.Duration.Seconds())
	}
}

// Describe implements [prometheus.Collector].
func (o *Observer) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range o.parts() {
		c.Describe(ch)
	}
}

// Collect implements [prometheus.Collector].
func (o *Observer) Collect(ch chan<- prometheus.Metric) {
	for _, c := range o.parts() {
		c.Collect(ch)
	}
}

func (o *Observer) parts() []prometheus.Collector {
	parts := []prometheus.Collector{o.wait, o.hold, o.refused, o.lost, o.longHolds, o.longNow, o.conflicts}
	if o.classes != nil {
		parts = append(parts, o.classWait, o.classLost)
	}
	return parts
}
