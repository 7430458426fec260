package lockprom

import (
	"database/sql"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/mysqllock/mysqllock"
	"github.com/mysqllock/mysqllock/telemetry/internal/uses"
)

// NewStatsCollector returns a Collector of [mysqllock.Stats]: who waits, and the
// connections by what they are for. It fails where db was not opened with the driver.
//
//	mysqllock_connections                      gauge    connections now    use, state: in_use, idle, opening
//	mysqllock_connections_max                  gauge    the bound for all of them, maxConns
//	mysqllock_connections_reserved             gauge    of these, the ones that nobody uses and that are kept for the driver's own statements
//	mysqllock_connections_waiting              gauge    callers that wait for one now    use
//	mysqllock_connections_waited_total         counter  times that none was ready    use
//	mysqllock_connections_wait_seconds_total   counter  time that callers waited for one, until they waited no more    use
//	mysqllock_waiters                          gauge    callers that wait now, for a lock or for a connection to take it on
//	mysqllock_oldest_wait_seconds              gauge    how long the caller that came first has waited; 0 for none
//	mysqllock_oldest_hold_seconds              gauge    how long the lock that has been held for the longest is held; 0 for none
//	mysqllock_sessions_max                     gauge    the bound, lockMaxConns
//	mysqllock_sessions                         gauge    connections now    state: in_use, idle, opening
//	mysqllock_sessions_acquired_total          counter  times that a session was handed out
//	mysqllock_sessions_waited_total            counter  times that none was ready
//	mysqllock_sessions_wait_seconds_total      counter  time that callers waited for one
//
// Uses are app (statements of the application), sessions, leases, advisory and control
// (making rows, killing waiters). Without maxConns there is no mysqllock_connections_max or
// …_reserved, and no use app: of these connections collectors.NewDBStatsCollector tells. With
// maxConns that one counts callers, not connections. Who stands by for a leadership (package
// leader), or has one, is in mysqllock_waiters, but not in the gauges of the oldest.
func NewStatsCollector(db *sql.DB) (prometheus.Collector, error) {
	if _, err := mysqllock.Stats(db); err != nil {
		return nil, err
	}
	return stats{db}, nil
}

type stats struct{ db *sql.DB }

var (
	connections     = prometheus.NewDesc("mysqllock_connections", "Connections now, by what they are for.", []string{"use", "state"}, nil)
	connectionsMax  = prometheus.NewDesc("mysqllock_connections_max", "The most connections for everything: maxConns.", nil, nil)
	connectionsKept = prometheus.NewDesc("mysqllock_connections_reserved",
		"Of maxConns, those that nobody uses and that are kept for the driver's own statements.", nil, nil)
	connectionsWait = prometheus.NewDesc("mysqllock_connections_waiting",
		"Callers that wait for a connection now, by what it is for.", []string{"use"}, nil)
	connectionsWaited = prometheus.NewDesc("mysqllock_connections_waited_total",
		"Times that no connection was ready and a caller waited, by what it is for.", []string{"use"}, nil)
	connectionsTime = prometheus.NewDesc("mysqllock_connections_wait_seconds_total",
		"Time that callers waited for a connection, by what it is for.", []string{"use"}, nil)

	waiters = prometheus.NewDesc("mysqllock_waiters",
		"Callers of this process that wait now, for a lock or for a connection to take it on.", nil, nil)
	oldestWait = prometheus.NewDesc("mysqllock_oldest_wait_seconds",
		"How long the one of mysqllock_waiters that came first has waited; 0 for none.", nil, nil)
	oldestHold = prometheus.NewDesc("mysqllock_oldest_hold_seconds",
		"How long the lock that this process has held for the longest is held; 0 for none.", nil, nil)
	sessionsMax = prometheus.NewDesc("mysqllock_sessions_max", "The most connections that sessions may have.", nil, nil)
	sessions    = prometheus.NewDesc("mysqllock_sessions", "Connections that sessions have now.", []string{"state"}, nil)
	acquired    = prometheus.NewDesc("mysqllock_sessions_acquired_total", "Times that a session was given a connection.", nil, nil)
	waited      = prometheus.NewDesc("mysqllock_sessions_waited_total",
		"Times that no connection was ready for a session, and it waited.", nil, nil)
	waitSeconds = prometheus.NewDesc("mysqllock_sessions_wait_seconds_total", "Time that sessions waited for a connection.", nil, nil)
)

// Describe implements [prometheus.Collector].
func (stats) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{
		connections, connectionsMax, connectionsKept, connectionsWait, connectionsWaited, connectionsTime,
		waiters, oldestWait, oldestHold, sessionsMax, sessions, acquired, waited, waitSeconds,
	} {
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
	seconds := func(d *prometheus.Desc, of time.Duration) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, of.Seconds())
	}
	gauge := func(d *prometheus.Desc, n int, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(n), labels...)
	}
	counter := func(d *prometheus.Desc, n float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, n, labels...)
	}
	if now.MaxConns > 0 {
		gauge(connectionsMax, now.MaxConns)
		gauge(connectionsKept, now.Reserved)
	}
	for _, of := range uses.Of(now) {
		gauge(connections, of.InUse, of.Use, "in_use")
		gauge(connections, of.Idle, of.Use, "idle")
		gauge(connections, of.Opening, of.Use, "opening")
		gauge(connectionsWait, of.Waiting, of.Use)
		counter(connectionsWaited, float64(of.Waited), of.Use)
		counter(connectionsTime, of.WaitTime.Seconds(), of.Use)
	}
	gauge(waiters, now.Waiters)
	seconds(oldestWait, now.OldestWait)
	seconds(oldestHold, now.OldestHold)
	gauge(sessionsMax, now.Max)
	gauge(sessions, now.InUse, "in_use")
	gauge(sessions, now.Idle, "idle")
	gauge(sessions, now.Opening, "opening")
	counter(acquired, float64(now.Acquired))
	counter(waited, float64(now.Waited))
	counter(waitSeconds, now.WaitTime.Seconds())
}
