// Package engines has what servers say of themselves, for tests.
package engines

import (
	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/fakeserver"
)

// The numbers of what servers lack, as MySQL calls them.
const (
	parseError   = 1064 // ER_PARSE_ERROR
	unknownError = 1105 // ER_UNKNOWN_ERROR
	noVariable   = 1193 // ER_UNKNOWN_SYSTEM_VARIABLE
)

func unknownVariable(name string) error {
	return &mysql.MySQLError{Number: noVariable, Message: "Unknown system variable '" + name + "'"}
}

func syntax(near string) error {
	return &mysql.MySQLError{Number: parseError, Message: "syntax error near '" + near + "'"}
}

// Foreign are engines that speak MySQL's protocol, on which its locks do not hold or nobody
// knows, by what an error has to call them. Of most there is one that answers everything: a
// version with fewer gaps may.
var Foreign = map[string][]fakeserver.Engine{
	"Vitess 8.4.6-Vitess": {
		{Version: "9.7.0", Variable: "8.4.6-Vitess", Comment: vitess24, Lacks: syntax("timestamp"), Shards: "shop/-80 shop/80-"},
		{Version: "9.7.0", Variable: "8.4.6-Vitess", Comment: vitess24, Shards: "other/0 shop/0"},
	},
	"Vitess 8.4.6": { // mysql_server_version may be set
		{Version: "9.7.0", Variable: "8.4.6", Comment: vitess24, Database: "shop@replica", Shards: "shop/0"},
	},
	"Vitess 8.0.34-PlanetScale": {{Version: "8.0.34", Variable: "8.0.34-PlanetScale", Comment: ""}},
	"Dolt or go-mysql-server 8.0.33": {
		{Version: "8.0.33", Comment: "Dolt", Lacks: unknownVariable("innodb_rollback_on_timeout")},
		{Version: "8.0.33", Comment: "Dolt"},
	},
	"OceanBase 5.7.25-OceanBase_CE-v4.2.1": {{Version: "5.7.25-OceanBase_CE-v4.2.1", Comment: "OceanBase_CE 4.2.1"}},
	"an unknown engine, 8.0.44-Abacus (Abacus DB)": {
		{Version: "8.0.44-Abacus", Comment: "Abacus DB", Lacks: unknownVariable("innodb_rollback_on_timeout")},
		{Version: "8.0.44-Abacus", Comment: "Abacus DB", Lacks: &mysql.MySQLError{Number: unknownError, Message: "unsupported"}},
	},
	"an unknown engine, Abacus-3 (Abacus DB)": {{Version: "Abacus-3", Comment: "Abacus DB"}},
}

const vitess24 = "Version: 24.0.0 (Git revision 1 branch 'main') built on a day"

// Vitess are forms in which Vitess answers that has one shard, by what an error has to call them.
var Vitess = map[string]fakeserver.Engine{
	"Vitess 8.4.6-Vitess": {Version: "8.4.6-Vitess", Comment: vitess24, Shards: "shop/0"},
	"Vitess 8.4.6": {
		Version: "9.7.0", Variable: "8.4.6", Comment: vitess24, Lacks: syntax("timestamp"),
		Database: "shop@primary", Shards: "shop/0",
	},
	"Vitess 8.0.34-PlanetScale": {Version: "8.0.34", Variable: "8.0.34-PlanetScale", Shards: "shop/-"},
}

// TiDB are forms in which TiDB answers, by what an error has to call them.
var TiDB = map[string]fakeserver.Engine{
	"TiDB 8.0.11-TiDB-v8.5.0": {Version: "8.0.11-TiDB-v8.5.0", Comment: tidb + "8.0 compatible", Lacks: unknownVariable("log_bin")},
	"TiDB 8.0.11-TiDB-v8.1.0": {Version: "8.0.11-TiDB-v8.1.0", Comment: tidb + "8.0 compatible"},
	"TiDB 5.7.25":             {Version: "5.7.25", Comment: tidb + "5.7 compatible"}, // server-version may be set
}

const tidb = "TiDB Server (Apache License 2.0) Community Edition, MySQL "

// Builds are MySQL and MariaDB as their builders and hosts call them.
var Builds = []fakeserver.Engine{
	{Version: "9.7.0", Comment: "MySQL Community Server - GPL"},
	{Version: "8.4.0-commercial", Comment: "MySQL Enterprise Server - Commercial"},
	{Version: "9.1.0-cloud", Comment: "MySQL Enterprise - Cloud"}, // HeatWave
	{Version: "8.0.35-u3-cloud", Comment: "MySQL Enterprise - Cloud"},
	{Version: "8.0.36-debug", Comment: "Source distribution"},
	{Version: "8.0.36-0ubuntu0.22.04.1", Comment: "(Ubuntu)"},
	{Version: "9.7.0-1", Comment: "(Debian)"},
	{Version: "9.0.1", Comment: "Homebrew"},
	{Version: "8.0.36-28", Comment: "Percona Server (GPL), Release 28, Revision 47601f19"},
	{Version: "8.0.36-28.1", Comment: "Percona XtraDB Cluster (GPL), Release rel28, Revision bfb687f, WSREP version 26.1.4.3"},
	{Version: "8.0.28", Comment: "Source distribution"},                  // Amazon RDS, Aurora
	{Version: "8.0.mysql_aurora.3.08.0", Comment: "Source distribution"}, // Aurora, as it calls its engine
	{Version: "8.0.37-azure", Comment: "Source distribution"},
	{Version: "8.0.31-google", Comment: "(Google)"}, // Cloud SQL
	{Version: "8.0.32-25", Comment: "GreatSQL, Release 25, Revision 79f57097e3f"},
	{Version: "8.0.30-txsql", Comment: "our own build"},
	{Version: "8.0.33-acme", Comment: ""},
	{Version: "8.4.0", Comment: "(ProxySQL)"},
	{Version: "8.4.0-router", Comment: "MySQL Router"},
	{Version: "10.11.19-MariaDB", Comment: "mariadb.org binary distribution"},
	{Version: "11.8.3-MariaDB-0+deb13u1 from Debian", Comment: " -- Please help get to 10k stars at https://github.com/MariaDB/Server"},
	{Version: "10.6.14-MariaDB-log", Comment: "managed by https://aws.amazon.com/rds/"},
	{Version: "10.6.16-11-MariaDB-enterprise-log", Comment: "MariaDB Enterprise Server"},
	{Version: "5.5.5-10.11.9-MariaDB", Comment: "Alpine Linux"},
	{Version: "11.4.2-MariaDB-wsrep", Comment: "Homebrew"}, // Galera
}
