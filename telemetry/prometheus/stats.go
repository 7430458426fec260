package lockprom

import (
	"database/sql"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/mysqllock/mysqllock"
)

// NewStatsCollector returns a Collector of [mysqllock.Stats]: who waits, and the
// connections that sessions have, beside those of which
// collectors.NewDBStatsCollector tells. It fails where db was not opened with the
// driver.
//
//	mysqllock_waiters                          gauge    callers that wait now, for a lock or for a connection to take it on
//	mysqllock_sessions_max                     gauge    the bound, lockMaxConns
//	mysqllock_sessions                         gauge    connections now    state: in_use, idle, opening
//	mysqllock_sessions_acquired_total          counter  times that one was handed out
//	mysqllock_sessions_waited_total            counter  times that none was ready
//	mysqllock_sessions_wait_seconds_total      counter  time that callers waited for one
func NewStatsCollector(db *sql.DB) (prometheus.Collector, error) {
	if _, err := mysqllock.Stats(db); err != nil {
		return nil, err
	}
	return stats{db}, nil
}

type stats struct{ db *sql.DB }

var (
	waiters     = prometheus.NewDesc("mysqllock_waiters", "Callers of this process that wait now, for a lock or for a connection to take it on.", nil, nil)
	sessionsMax = prometheus.NewDesc("mysqllock_sessions_max", "The most connections that sessions may have.", nil, nil)
	sessions    = prometheus.NewDesc("mysqllock_sessions", "Connections that sessions have now.", []string{"state"}, nil)
	acquired    = prometheus.NewDesc("mysqllock_sessions_acquired_total", "Times that a session was given a connection.", nil, nil)
	waited      = prometheus.NewDesc("mysqllock_sessions_waited_total", "Times that no connection was ready for a session, and it waited.", nil, nil)
	waitSeconds = prometheus.NewDesc("mysqllock_sessions_wait_seconds_total", "Time that sessions waited for a connection.", nil, nil)
)

// Describe implements [prometheus.Collector].
func (stats) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{waiters, sessionsMax, sessions, acquired, waited, waitSeconds} {
		ch <- d
	}
}

// Collect implements [prometheus.Collector].
func (s stats) Collect(ch chan<- prometheus.Metric) {
	now, err := mysqllock.Stats(s.db)
	if err != nil {
		ch <- prometheus.NewInvalidMetric(waiters, err)
		return
	}
	gauge := func(d *prometheus.Desc, n int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(n), labels...)
	}
	counter := func(d *prometheus.Desc, n float64) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, n)
	}
	gauge(waiters, now.Waiters)
	gauge(sessionsMax, now.Max)
	gauge(sessions, now.InUse, "in_use")
	gauge(sessions, now.Idle, "idle")
	gauge(sessions, now.Opening, "opening")
	counter(acquired, float64(now.Acquired))
	counter(waited, float64(now.Waited))
	counter(waitSeconds, now.WaitTime.Seconds())
}
